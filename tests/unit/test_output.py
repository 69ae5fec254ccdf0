"""From token ids to text and finish: end tokens, stop strings, limits, replay."""

from typing import cast

from contracts.requests import FinishReason, SamplingParams, Token
from engine.output import OutputProcessor
from text.tokenizer import Tokenizer

EOS = 0


class Pieces:
    """Token n >= 1 is the n-th piece; token 0 is the end token."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = (b"", *pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def processor(pieces: tuple[bytes, ...], **sampling: object) -> OutputProcessor:
    params = SamplingParams(**({"max_tokens": 50, "seed": 0} | sampling))  # type: ignore[arg-type]  # test shorthand
    return OutputProcessor(cast(Tokenizer, Pieces(*pieces)), frozenset({EOS}), params)


def play(output: OutputProcessor, ids: list[int]) -> tuple[str, list[Token]]:
    tokens = []
    for token_id in ids:
        tokens.append(output.push(token_id, None))
        if tokens[-1].finish:
            break
    return "".join(token.text for token in tokens), tokens


def test_a_stop_string_over_chunks_is_never_shown() -> None:
    pieces = (b"A", b"BC", b"DEF", b"G", b"HI", b"J", b"K", b"X")
    text, tokens = play(processor(pieces, stop=("DEFGHIJ",)), [1, 2, 3, 4, 5, 6, 7])
    assert (text, tokens[-1].finish, len(tokens)) == ("ABC", FinishReason.STOP, 6)
    text, tokens = play(processor(pieces, stop=("DEFGHIJ",)), [1, 2, 3, 4, 5, 8, EOS])
    assert (text, tokens[-1].finish) == ("ABCDEFGHIX", FinishReason.STOP)


def test_held_text_comes_out_at_the_end() -> None:
    pieces = (b"A", b"DEF")
    for ids, more in (([1, 2, EOS], {}), ([1, 2], {"max_tokens": 2})):
        text, tokens = play(processor(pieces, stop=("DEFG",), **more), ids)
        assert text == "ADEF"
        assert tokens[-1].finish is not None


def test_a_stop_inside_a_token() -> None:
    pieces = (b"please", b"stop!", b"more")
    assert play(processor(pieces, stop=("stop",)), [1, 2, 3])[0] == "please"
    text, tokens = play(processor(pieces, stop=("stop",), include_stop=True), [1, 2, 3])
    assert (text, len(tokens)) == ("pleasestop", 2)


def test_an_end_token_ends_without_text() -> None:
    text, tokens = play(processor((b"a",)), [1, EOS])
    assert (text, tokens[-1].finish, tokens[-1].position) == ("a", FinishReason.STOP, 2)
    text, tokens = play(processor((b"a", b"b"), stop_token_ids=(2,)), [1, 2])
    assert (text, tokens[-1].finish) == ("a", FinishReason.STOP)
    text, tokens = play(processor((b"a",), ignore_eos=True, max_tokens=3), [1, EOS, 1])
    assert (text, tokens[-1].finish) == ("aa", FinishReason.LENGTH)


def test_min_tokens_bans_end_tokens_and_does_not_stop() -> None:
    output = processor((b"a", b"b"), min_tokens=2, stop_token_ids=(2,), stop=("aa",))
    banned_at_first = output.banned
    text, tokens = play(output, [1, 1, 1, 1])
    assert (banned_at_first, output.banned) == ((0, 2), ())
    assert (text, tokens[-1].finish, len(tokens)) == ("aa", FinishReason.STOP, 4)


def test_a_cut_character_is_one_replacement_character() -> None:
    pieces = ("\U0001fae0".encode()[:2], "\U0001fae0".encode()[2:3])
    _, tokens = play(processor(pieces, max_tokens=2), [1, 2])
    assert [token.text for token in tokens] == ["", "\ufffd"]


def test_replay_goes_on_where_the_other_stopped() -> None:
    pieces = (*(bytes([b]) for b in "a\U0001fae0bSTO".encode()), b"P")
    ids = list(range(1, len(pieces) + 1))
    whole, tokens = play(processor(pieces, stop=("STOP",)), ids)
    for cut in range(len(ids)):
        output = processor(pieces, stop=("STOP",))
        output.replay(tuple(ids[:cut]))
        rest = [output.push(token_id, None) for token_id in ids[cut:]]
        assert rest == tokens[cut:]
    assert whole == "a\U0001fae0b"

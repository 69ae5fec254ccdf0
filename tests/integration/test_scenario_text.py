"""Characters that the vocabulary splits over tokens come out whole, on every way out."""

from pathlib import Path

import pytest
import tokenizers

from tests.helpers.answers import CHAT_WAYS, WAYS, ask, settled
from tests.helpers.checkpoints import START, make_script_llama
from tests.helpers.model_cluster import model_config, served_cluster

TEXTS = {
    "melting face": "\U0001fae0ok",
    "turtle": "\u9f9cok",
    "d with caron": "\u010fok",
    "family": "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466ok",
    "flag": "\U0001f1e8\U0001f1ffok",
    "mixed": "a\u010f\u9f9c\U0001fae0\U0001f1e8\U0001f1ff.",
}


def pieces_of(text: str) -> list[bytes]:
    """The shortest pieces of its UTF-8, from the left, of which none stands twice."""
    pieces: list[bytes] = []
    start = 0
    data = text.encode()
    for end in range(1, len(data) + 1):
        if data[start:end] not in pieces:
            pieces.append(data[start:end])
            start = end
    assert b"".join(pieces) == data
    return pieces


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_split_characters(text: str, tmp_path: Path) -> None:
    pieces = pieces_of(text)
    script = make_script_llama(tmp_path, pieces)
    decoded = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(list(script.token_ids))
    assert decoded == text
    async with served_cluster(model_config(tmp_path)) as served:
        for way in WAYS + CHAT_WAYS:
            prompt: list[int] | str = [START] if way in WAYS else "hi"
            answer = await ask(served, way, prompt, max_tokens=len(pieces), temperature=0)
            assert (answer.text, answer.finish, answer.completion_tokens) == (text, "length", len(pieces))
            ended = await ask(served, way, prompt, max_tokens=len(pieces) + 5, temperature=0)
            assert (ended.text, ended.finish, ended.completion_tokens) == (text, "stop", len(pieces) + 1)
            assert "\ufffd" not in answer.text + ended.text
        over_grpc = await ask(served, "grpc", [START], max_tokens=len(pieces), temperature=0)
        assert over_grpc.token_ids == list(script.token_ids)
        await settled(served)


async def test_a_part_of_a_character_carries_no_text(tmp_path: Path) -> None:
    """Read from the stream: what comes with each token."""
    make_script_llama(tmp_path, pieces_of("\U0001fae0ok"))
    async with served_cluster(model_config(tmp_path, transport="grpc")) as served:
        answer = await ask(served, "grpc", [START], max_tokens=6, temperature=0)
        texts = [token.text for response in answer.raw for token in response.tokens]
        assert texts == ["", "", "", "\U0001fae0", "o", "k"]
        assert answer.pieces[0].startswith("\U0001fae0")
        streamed = await ask(served, "stream", [START], max_tokens=6, temperature=0)
        assert all(chunk["choices"][0]["text"] or chunk["choices"][0]["finish_reason"] for chunk in streamed.raw)


async def test_a_character_that_the_limit_cuts_is_one_replacement(tmp_path: Path) -> None:
    make_script_llama(tmp_path, pieces_of("ok\U0001fae0"))
    async with served_cluster(model_config(tmp_path)) as served:
        for way in WAYS:
            for limit in (3, 4, 5):
                answer = await ask(served, way, [START], max_tokens=limit, temperature=0)
                assert (answer.text, answer.finish) == ("ok\ufffd", "length")

"""Encoding with and without control tokens, and the bytes that each token adds."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from contracts.config import ModelConfig
from contracts.errors import InvalidRequest, ModelError
from tests.helpers.text_models import (
    SPECIALS,
    byte_level_tokenizer,
    byte_tokens,
    is_control,
    write_gguf_model,
    write_hf_model,
)
from text.model_resolver import resolve_model
from text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    "hello",
    "  two  spaces 12 345",
    "caf\u00e9 \u9f9c \U0001fae0",
    "\x00\x7f\u00ad\u00a0\t\r\n",
    "<|im_start|>",
]


def load(path: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(ModelConfig(name=str(path)), lambda line: None))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load(write_hf_model(tmp_path / "hf"))


@pytest.mark.parametrize("kind", ["gguf", "hf"])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_an_encoding_are_the_text(tmp_path: Path, kind: str, text: str) -> None:
    path = write_gguf_model(tmp_path / "m.gguf") if kind == "gguf" else write_hf_model(tmp_path / "hf")
    tokenizer = load(path)
    ids = tokenizer.encode(text, control_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert not any(is_control(tokenizer, token_id) for token_id in ids)


def test_control_tokens_only_where_asked(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>a<|eos|>"
    honoured = tokenizer.encode(text, control_tokens=True)
    assert [tokenizer.token_text(token_id) for token_id in honoured] == ["<|im_start|>", "a", "<|eos|>"]
    assert [is_control(tokenizer, token_id) for token_id in honoured] == [True, False, True]
    assert len(tokenizer.encode(text, control_tokens=False)) == len(text)
    assert sorted(tokenizer.control_literals) == sorted(SPECIALS)


def test_control_tokens_add_no_bytes_and_show_their_literal(tokenizer: Tokenizer) -> None:
    assert [(tokenizer.token_bytes(i), tokenizer.token_text(i)) for i in (0, 3)] == [
        (b"", "<|bos|>"),
        (b"", "<|im_start|>"),
    ]


@pytest.mark.parametrize("token_id", [-1, 261, 319, 10**9])
def test_ids_without_a_token_add_nothing(tokenizer: Tokenizer, token_id: int) -> None:
    assert (tokenizer.vocab_size, tokenizer.token_bytes(token_id), tokenizer.token_text(token_id)) == (261, b"", "")
    assert not is_control(tokenizer, token_id)


def test_a_token_that_is_part_of_a_character(tokenizer: Tokenizer) -> None:
    first, *_ = tokenizer.encode("\u9f9c", control_tokens=True)
    assert (tokenizer.token_bytes(first), tokenizer.token_text(first)) == (b"\xe9", "\ufffd")


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        tokenizer.encode("\ud800", control_tokens=True)


def test_added_token_that_is_no_control_token_is_text(tmp_path: Path) -> None:
    backend = byte_level_tokenizer()
    backend.add_tokens([AddedToken("<th\u00efnk>", normalized=False)])
    tokenizer = load(write_hf_model(tmp_path, tokenizer=backend))
    assert tokenizer.encode("<th\u00efnk>", control_tokens=False) == [261]
    assert tokenizer.token_bytes(261) == "<th\u00efnk>".encode()


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    assert len(load(write_hf_model(tmp_path, tokenizer=backend)).encode("hello", control_tokens=True)) == 5


def sentencepiece_backend() -> Backend:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "i", "\u2581hi", "hi"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = BPE(vocab=vocabulary, merges=[("h", "i"), ("\u2581", "hi")], unk_token="<unk>", byte_fallback=True)
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens[:3]])
    return backend


def test_sentencepiece_style(tmp_path: Path) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = load(write_hf_model(tmp_path, tokenizer=sentencepiece_backend(), tokenizer_config=names))
    ids = tokenizer.encode("hi \u9f9c hi", control_tokens=True)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " hi \u9f9c hi".encode()
    assert [tokenizer.token_bytes(i) for i in (1, 3, 3 + 0xE9)] == [b"", b"\x00", b"\xe9"]
    assert not any(is_control(tokenizer, i) for i in tokenizer.encode("</s>", control_tokens=False))


def test_digits_and_space_runs_are_cut_as_smollm_does(tmp_path: Path) -> None:
    space, one = "\u0120", "1"
    merges = [f"{space} {space}", f"{one} {one}", f"{space} {one}"]
    tokenizer = load(write_gguf_model(tmp_path / "m.gguf", merges=merges))
    ids = tokenizer.encode("  11", control_tokens=True)
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["  ", "1", "1"]


@pytest.mark.parametrize(("pre", "pieces"), [("gpt-2", [" 11", "11"]), ("llama-bpe", [" ", "111", "1"])])
def test_other_ways_of_cutting(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    merges = ["1 1", "11 1"] if pre == "llama-bpe" else ["1 1", "\u0120 11"]
    tokenizer = load(write_gguf_model(tmp_path / "m.gguf", pre=pre, merges=merges))
    ids = tokenizer.encode(" 1111", control_tokens=True)
    assert [tokenizer.token_text(token_id) for token_id in ids] == pieces


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; supported: gpt-2, llama-bpe, smollm"),
        ({"tokenizer": "llama"}, "tokenizer 'llama' is not supported; supported: gpt2"),
        ({"merges": ["nospace"]}, "the tokenizer is damaged"),
        ({"extra": {"llama.vocab_size": 100}}, "the tokenizer has 261 tokens, the model's vocabulary only 100"),
    ],
)
def test_refused_gguf_tokenizers(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = write_gguf_model(tmp_path / "m.gguf", **changes)  # type: ignore[arg-type] # a table of keywords
    with pytest.raises(ModelError, match=message):
        load(path)


def test_refused_tokenizer_files(tmp_path: Path) -> None:
    backend = byte_level_tokenizer()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="the decoder WordPiece is not supported"):
        load(write_hf_model(tmp_path / "a", tokenizer=backend))
    damaged = write_hf_model(tmp_path / "b") / "tokenizer.json"
    tree = json.loads(damaged.read_text())
    tree["model"]["merges"] = [["x", "no such token"]]
    damaged.write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a valid tokenizer"):
        load(damaged.parent)


def test_fingerprint_follows_the_vocabulary(tmp_path: Path) -> None:
    one = load(write_hf_model(tmp_path / "a")).fingerprint
    assert load(write_hf_model(tmp_path / "b")).fingerprint == one
    other = byte_level_tokenizer(pieces=[byte_tokens()[70] * 2])
    assert load(write_hf_model(tmp_path / "c", tokenizer=other)).fingerprint != one


def test_both_ways_of_encoding_at_once(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user" * 50
    with ThreadPoolExecutor(4) as threads:
        lengths = list(threads.map(lambda index: len(tokenizer.encode(text, index % 2 == 0)), range(200)))
    assert lengths == [250, 800] * 100

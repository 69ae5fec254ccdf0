"""GGUF headers: values, end tokens, what is refused, and files that are cut anywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from contracts.errors import ModelError
from tests.helpers.text_models import CHAT, write_gguf_model
from text.gguf_header import read_gguf_header
from text.gguf_metadata import read_gguf_metadata


def test_values(tmp_path: Path) -> None:
    extra: dict[str, Any] = {
        "llama.rope.freq_base": 5000.0,
        "llama.vocab_size": 300,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT,
    }
    found = read_gguf_metadata(write_gguf_model(tmp_path / "m.gguf", extra=extra), "m")
    assert (found.model_type, found.vocab_size, found.hidden_size, found.intermediate_size) == ("llama", 300, 64, 128)
    assert (found.layers, found.heads, found.kv_heads, found.head_dim, found.rope_dim) == (2, 4, 2, 16, 16)
    assert np.float32(found.rms_norm_eps) == np.float32(1e-5)
    assert (found.rope_theta, found.max_context, found.tie_embeddings) == (5000.0, 256, False)
    assert (found.bos_id, found.eos_ids, found.add_bos) == (0, frozenset({1, 2}), True)
    assert (found.bos_token, found.eos_token, found.chat_template) == ("<|bos|>", "<|eos|>", CHAT)


def test_defaults(tmp_path: Path) -> None:
    found = read_gguf_metadata(write_gguf_model(tmp_path / "m.gguf", tensors=["token_embd.weight"]), "m")
    assert (found.vocab_size, found.rope_theta, found.tie_embeddings) == (261, 10000.0, True)
    assert (found.bos_id, found.eos_ids, found.add_bos, found.chat_template) == (None, frozenset(), False, None)


def test_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf_model(tmp_path / "m.gguf", merges=["h i"], extra={"general.alignment": 64})
    header, reader = read_gguf_header(path), GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert dict(header.fields) == expected
    assert [
        (tensor.name, tuple(int(n) for n in tensor.shape), tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        for tensor in reader.tensors
    ] == [(t.name, t.shape, t.type, t.offset, t.size) for t in header.tensors.values()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "model type 'qwen2' is not supported; supported: .*llama"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn'"),
        ({"tensors": ["rope_freqs.weight"]}, "rope scaling 'rope_freqs'"),
        ({"tensors": ["blk.0.attn_q.bias"]}, r"bias are not supported \(tensor blk\.0\.attn_q\.bias\)"),
        ({"extra": {"llama.expert_count": 8}}, "mixtures of experts"),
        ({"extra": {"llama.rope.freq_base": "big"}}, r"llama\.rope\.freq_base is not of type float"),
        ({"extra": {"llama.rope.dimension_count": 15}}, "rope_dim 15"),
        ({"extra": {"llama.rope.freq_base": 0.0}}, "rope_theta must be above 0"),
        ({"extra": {"tokenizer.ggml.eos_token_id": 261}}, r"eos_token_id 261 is outside the vocabulary"),
        ({"extra": {"llama.vocab_size": 2, "tokenizer.ggml.eos_token_id": 4}}, "special token id 4 is outside"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_gguf_model(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelError, match=message) as raised:
        read_gguf_metadata(path, "m")
    assert str(path) in raised.value.message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_gguf_model(tmp_path / "m.gguf")
    whole = path.read_bytes()
    read_gguf_metadata(path, "m")
    last = max(tensor.offset + tensor.size for tensor in read_gguf_header(path).tensors.values())
    for length in [*range(0, 100, 7), 500, 5000, last - 1024, last - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"m\.gguf"):
            read_gguf_metadata(path, "m")


@pytest.mark.parametrize(("position", "byte"), [(0, 0), (4, 1), (4, 9), (15, 0xFF), (23, 0x7F), (31, 0x7F), (32, 0xFF)])
def test_damaged_header_is_refused(tmp_path: Path, position: int, byte: int) -> None:
    path = write_gguf_model(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[position] = byte
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"m\.gguf"):
        read_gguf_metadata(path, "m")


def test_fingerprint_follows_content_not_name(tmp_path: Path) -> None:
    first = write_gguf_model(tmp_path / "first.gguf")
    second = tmp_path / "second.gguf"
    second.write_bytes(first.read_bytes())
    same = read_gguf_metadata(first, "a").fingerprint
    assert read_gguf_metadata(second, "b").fingerprint == same
    data = bytearray(first.read_bytes())
    data[-1] ^= 1  # a weight
    second.write_bytes(data)
    assert read_gguf_metadata(second, "b").fingerprint != same

"""Hugging Face directories: values, defaults, the union of end tokens, templates, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from contracts.errors import ModelError
from tests.helpers.text_models import CHAT, byte_level_tokenizer, write_hf_model
from text.hf_metadata import read_hf_metadata
from text.metadata import ModelMetadata
from text.weight_files import find_weight_files


def read(directory: Path) -> ModelMetadata:
    return read_hf_metadata(directory, find_weight_files(directory), "m")


def test_values(tmp_path: Path) -> None:
    found = read(write_hf_model(tmp_path))
    assert (found.model_type, found.vocab_size, found.hidden_size, found.intermediate_size) == ("llama", 320, 64, 128)
    assert (found.layers, found.heads, found.kv_heads, found.head_dim, found.rope_dim) == (2, 4, 2, 16, 16)
    assert (found.rms_norm_eps, found.rope_theta, found.max_context, found.tie_embeddings) == (1e-5, 5000.0, 256, False)
    assert (found.bos_id, found.bos_token, found.eos_token, found.add_bos) == (0, "<|bos|>", "<|eos|>", False)
    assert found.chat_template == CHAT


def test_defaults_and_nulls(tmp_path: Path) -> None:
    absent = {"num_key_value_heads": None, "rope_theta": None, "bos_token_id": None, "eos_token_id": None}
    found = read(write_hf_model(tmp_path, changes={**absent, "rope_scaling": None}, tokenizer_config={}))
    assert (found.kv_heads, found.rope_theta, found.bos_id, found.bos_token) == (4, 10000.0, None, "")
    assert (found.eos_ids, found.add_bos, found.chat_template) == (frozenset(), False, None)


def test_rope_parameters_of_transformers_5(tmp_path: Path) -> None:
    changes = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7000}}
    assert read(write_hf_model(tmp_path, changes=changes)).rope_theta == 7000.0


@pytest.mark.parametrize(
    ("generation", "config", "token", "expected"),
    [
        ({"eos_token_id": [3, 4]}, 3, "<|eos|>", {3, 4, 1}),  # a list, joined with the others and not replaced
        ({"eos_token_id": 2}, [3, 4], "<|eos|>", {2, 3, 4, 1}),
        ({}, 1, {"content": "<|eot|>"}, {1, 2}),
        (None, None, "<|eos|>", {1}),
        (None, 4, None, {4}),
        ({"eos_token_id": None}, 4, "no such token", {4}),
    ],
)
def test_end_tokens_are_the_union_of_all_files(
    tmp_path: Path, generation: dict[str, Any] | None, config: Any, token: Any, expected: set[int]
) -> None:
    directory = write_hf_model(
        tmp_path,
        changes={"eos_token_id": config},
        tokenizer_config={"eos_token": token},
        generation_config=generation,
    )
    assert read(directory).eos_ids == expected


def test_bos_is_added_when_the_post_processor_or_the_configuration_says_so(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    with_processor = {"bos_token": "<|bos|>"}
    assert read(write_hf_model(tmp_path / "a", tokenizer=tokenizer, tokenizer_config=with_processor)).add_bos
    denied = {**with_processor, "add_bos_token": False}
    assert not read(write_hf_model(tmp_path / "b", tokenizer=tokenizer, tokenizer_config=denied)).add_bos
    told = {**with_processor, "add_bos_token": True}
    assert read(write_hf_model(tmp_path / "c", tokenizer_config=told)).add_bos
    assert not read(write_hf_model(tmp_path / "d", tokenizer_config=with_processor)).add_bos


@pytest.mark.parametrize(
    ("in_json", "in_file", "expected"),
    [
        ("json", None, "json"),
        ("json", "file", "file"),
        (None, "file", "file"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], None, "d"),
        ([{"name": "tool_use", "template": "t"}], None, None),
        (None, None, None),
    ],
)
def test_where_chat_templates_lie(tmp_path: Path, in_json: Any, in_file: str | None, expected: str | None) -> None:
    directory = write_hf_model(tmp_path, tokenizer_config={"chat_template": in_json})
    if in_file is not None:
        (directory / "chat_template.jinja").write_text(in_file)
    assert read(directory).chat_template == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model type 'mamba' is not supported; supported: .*llama"),
        ({"model_type": None}, "lacks model_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, r"rope scaling 'linear' \(rope_scaling\)"),
        ({"rope_parameters": {"rope_type": "llama3"}}, r"rope scaling 'llama3' \(rope_parameters\)"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {}}, "quantised weights"),
        ({"vocab_size": "many"}, "vocab_size must be of type int, not 'many'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be of type int"),
        ({"num_attention_heads": 0}, "heads must be above 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"eos_token_id": 320}, "special token id 320 is outside the vocabulary of 320"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = write_hf_model(tmp_path, changes=changes)
    with pytest.raises(ModelError, match=message) as raised:
        read(directory)
    assert str(directory / "config.json") in raised.value.message


def test_fingerprint_follows_configuration_and_weights(tmp_path: Path) -> None:
    one = read(write_hf_model(tmp_path / "a")).fingerprint
    assert read(write_hf_model(tmp_path / "b")).fingerprint == one
    assert read(write_hf_model(tmp_path / "c", changes={"rope_theta": 1.0})).fingerprint != one
    weights = tmp_path / "b" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert read(tmp_path / "b").fingerprint != one

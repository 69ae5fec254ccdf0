"""Tiny models on disk with real headers, configurations and tokenizers, and tensors of no use."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from text.tokenizer import Tokenizer as TextTokenizer

SPECIALS = ("<|bos|>", "<|eos|>", "<|eot|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def is_control(tokenizer: TextTokenizer, token_id: int) -> bool:
    """Whether the token is a control token: it has a literal, and adds nothing to the output."""
    return not tokenizer.token_bytes(token_id) and tokenizer.token_text(token_id) in tokenizer.control_literals


def byte_tokens() -> list[str]:
    """The 256 characters of byte-level BPE, sorted."""
    return sorted(ByteLevel.alphabet())


def byte_level_tokenizer(pieces: Sequence[str] = (), specials: Sequence[str] = SPECIALS) -> Tokenizer:
    """Specials first (ids from 0), then the 256 bytes, then `pieces` (byte-level spelling), without merges."""
    tokens = [*specials, *byte_tokens(), *pieces]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    return tokenizer


def config(**changes: Any) -> dict[str, Any]:
    """A config.json of a small Llama."""
    return {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }


def write_hf_model(
    directory: Path,
    *,
    changes: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """A model directory; `changes` go into config.json. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(**(changes or {}))))
    (tokenizer or byte_level_tokenizer()).save(str(directory / "tokenizer.json"))
    defaults = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "chat_template": CHAT}
    tokenizer_config = defaults if tokenizer_config is None else tokenizer_config
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    if shards == 1:
        save_file({"t0": np.zeros(64, np.float32)}, directory / "model.safetensors")
        return directory
    weight_map = {f"t{index}": f"model-{index}-of-{shards}.safetensors" for index in range(shards)}
    for tensor, name in weight_map.items():
        save_file({tensor: np.zeros(64, np.float32)}, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def write_gguf_model(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    tokenizer: str = "gpt2",
    specials: Sequence[str] = SPECIALS,
    merges: Sequence[str] = (),
    extra: Mapping[str, int | float | str | bool] | None = None,
    tensors: Sequence[str] = ("token_embd.weight", "output.weight"),
) -> Path:
    """A GGUF file whose vocabulary is `specials`, the 256 bytes and the results of `merges`."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    ordinary = [*byte_tokens(), *(merge.replace(" ", "") for merge in merges)]
    writer.add_token_list([*specials, *ordinary])
    writer.add_token_types([TokenType.CONTROL] * len(specials) + [TokenType.NORMAL] * len(ordinary))
    writer.add_token_merges(list(merges))
    for key, value in (extra or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for tensor in tensors:
        writer.add_tensor(tensor, np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

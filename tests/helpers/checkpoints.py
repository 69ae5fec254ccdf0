"""Fixture checkpoints in Hugging Face format: script-llama and noise-llama. Both are real Llamas.

They make most cases independent of a downloaded model. Each takes well under a second to write, and
transformers loads them too.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

Tensors = dict[str, torch.Tensor]

BOS, EOS, EOT, IM_START, IM_END, PAD, UNUSED, START = range(8)
SPECIALS = ("<|bos|>", "<|eos|>", "<|eot|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|unused|>", "<|start|>")
FIRST_BYTE = len(SPECIALS)  # id of byte 0; the 256 bytes follow the control tokens
FIRST_PIECE = FIRST_BYTE + 256
FILLER = (b" la", b" le", b" li", b" lo")
NOISE_SEED = 2  # no step of greedy_prompts() comes closer than 1e-3 to a tie: tests/integration/test_noise_llama.py
NOISE_NEW_TOKENS = 48
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS = 4, 2, 16, 2
_NOISE_VOCAB, _NOISE_HIDDEN, _NOISE_INNER = 512, 64, 128


@dataclass(frozen=True, slots=True)
class Script:
    """What script-llama says: `token_ids` of the script, then the ids of its ending, over and over."""

    token_ids: tuple[int, ...]
    ending_ids: tuple[int, ...]


def make_script_llama(
    directory: Path, script: Sequence[bytes | str], ending: Literal["eos", "filler"] = "eos", max_context: int = 2048
) -> Script:
    """Write a Llama whose next token depends on the last one only: it says `script`, then ends.

    bytes are ordinary tokens (one of them each, whatever their length), str are control tokens by name.
    After `[7]` (<|start|>), and after any token that the script does not hold, the script begins. It ends
    with <|eos|>, or goes round the FILLER tokens. The best logit leads by more than 50. Raises ValueError
    when a token would stand twice, since the last token could not tell where it is.
    """
    pieces = [piece for piece in script if isinstance(piece, bytes) and len(piece) != 1]
    vocabulary = _vocabulary([*pieces, *FILLER])
    token_ids = tuple(_token_id(vocabulary, piece) for piece in script)
    ending_ids = (EOS,) if ending == "eos" else tuple(_token_id(vocabulary, piece) for piece in FILLER)
    chain = [*token_ids, *ending_ids]
    if len(set(chain) | {START}) != len(chain) + 1:
        raise ValueError(f"a token of the script stands twice: {list(script)}")
    follows = dict.fromkeys(range(len(vocabulary)), chain[0])
    follows.update(pairwise(chain))
    if ending == "filler":
        follows[chain[-1]] = ending_ids[0]

    # One-hot embeddings pass through layers of zeros to a head that holds the chain.
    vocab = len(vocabulary)
    hidden = -(-vocab // 16) * 16
    head = torch.zeros(vocab, hidden)
    head[list(follows.values()), list(follows)] = 4.0
    tensors = {name: torch.zeros(shape) for name, shape in _shapes(vocab, hidden, 16).items()}
    tensors |= {name: torch.ones_like(tensor) for name, tensor in tensors.items() if name.endswith("norm.weight")}
    tensors |= {"model.embed_tokens.weight": torch.eye(vocab, hidden), "lm_head.weight": head}
    write_checkpoint(directory, llama_config(vocab, hidden, 16, max_context=max_context), tensors)
    write_tokenizer(directory, vocabulary)
    return Script(token_ids, ending_ids)


def make_noise_llama(directory: Path, seed: int = NOISE_SEED) -> None:
    """Write a two-layer Llama with grouped-query attention and random float32 weights, vocabulary 512.

    Every token of the context moves its logits. Greedy decoding never ends by itself: the control tokens
    have logits of zero, far below the best.
    """
    write_noise_variant(directory, noise_tensors(seed))


def write_noise_variant(directory: Path, tensors: Tensors, shards: int = 1, **config: Any) -> None:
    """noise-llama with other weights, or other values in its config.json."""
    write_checkpoint(directory, noise_config(**config), tensors, shards)
    write_tokenizer(directory, noise_vocabulary())


def noise_config(**changes: Any) -> dict[str, Any]:
    """config.json of noise-llama."""
    return llama_config(_NOISE_VOCAB, _NOISE_HIDDEN, _NOISE_INNER) | changes


def noise_tensors(seed: int = NOISE_SEED) -> Tensors:
    """The weights of noise-llama under their Hugging Face names."""
    random = np.random.default_rng(seed)
    gains = {"embed_tokens": 8.0, "q_proj": 1.5, "k_proj": 1.5, "lm_head": 3.0}  # over sqrt(columns)
    tensors: Tensors = {}
    for name, shape in _shapes(_NOISE_VOCAB, _NOISE_HIDDEN, _NOISE_INNER).items():
        noise = torch.from_numpy(random.standard_normal(shape, dtype=np.float32))
        gain = gains.get(name.split(".")[-2], 1.0)
        tensors[name] = 1.0 + 0.1 * noise if name.endswith("norm.weight") else noise * (gain / shape[-1] ** 0.5)
    tensors["lm_head.weight"][:FIRST_BYTE] = 0.0
    return tensors


def noise_vocabulary() -> dict[str, int]:
    """The tokenizer's vocabulary of noise-llama: control tokens, bytes and pairs of letters."""
    letters = b"abcdefghijklmnop"
    pairs = [bytes((a, b)) for a in letters for b in letters]
    return _vocabulary(pairs[: _NOISE_VOCAB - FIRST_PIECE])


def greedy_prompts() -> list[list[int]]:
    """Prompts for noise-llama whose NOISE_NEW_TOKENS greedy tokens are nowhere near a tie."""
    random = np.random.default_rng(7)
    lengths = (1, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 100, 200)
    return [random.integers(FIRST_BYTE, _NOISE_VOCAB, length).tolist() for length in lengths]


def llama_config(vocab: int, hidden: int, inner: int, max_context: int = 2048) -> dict[str, Any]:
    """A config.json for the fixtures' attention shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
    }


def write_checkpoint(directory: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> None:
    """config.json, generation_config.json and the weights, in `shards` files (more than one: with an index)."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": [EOS, EOT]})
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, directory / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})


def write_tokenizer(directory: Path, vocabulary: dict[str, int]) -> None:
    """A byte-level BPE without merges: text becomes one token per byte. The tokenizer's own end token is
    <|im_end|>, so that three files name three different ones."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[IM_END],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _shapes(vocab: int, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(_LAYERS):
        for name, shape in (
            ("input_layernorm", (hidden,)),
            ("self_attn.q_proj", (_HEADS * _HEAD_DIM, hidden)),
            ("self_attn.k_proj", (_KV_HEADS * _HEAD_DIM, hidden)),
            ("self_attn.v_proj", (_KV_HEADS * _HEAD_DIM, hidden)),
            ("self_attn.o_proj", (hidden, _HEADS * _HEAD_DIM)),
            ("post_attention_layernorm", (hidden,)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _vocabulary(pieces: Sequence[bytes]) -> dict[str, int]:
    tokens = [*SPECIALS, *(_spelled(bytes((byte,))) for byte in range(256)), *map(_spelled, pieces)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"a vocabulary cannot hold a piece twice: {list(pieces)}")
    return vocabulary


def _token_id(vocabulary: dict[str, int], piece: bytes | str) -> int:
    return vocabulary[piece if isinstance(piece, str) else _spelled(piece)]


def _spelled(piece: bytes) -> str:
    """Bytes in the printable alphabet of GPT-2's byte-level BPE: printable Latin-1 characters stand for
    themselves, the other bytes, in order, for the characters from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in plain]
    return "".join(chr(byte) if byte in plain else chr(0x100 + moved.index(byte)) for byte in piece)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))

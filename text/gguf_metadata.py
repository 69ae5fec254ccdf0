"""ModelMetadata from a GGUF header. Called by model_resolver.py; never reads tensor data."""

from pathlib import Path

from contracts.errors import ModelError
from text.gguf_header import GgufHeader, read_gguf_header
from text.metadata import ModelMetadata, check_model_type, fingerprint

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_metadata(path: Path, name: str) -> ModelMetadata:
    """Raises ModelError when the file is damaged or holds a model that cannot be computed here."""
    header = read_gguf_header(path)
    model_type = header.get("general.architecture", str)
    check_model_type(model_type, path)
    _refuse_unsupported(header, model_type)

    def number(key: str, default: int | None = None) -> int:
        value: int = header.get(f"{model_type}.{key}", int, default)
        return value

    tokens = header.get("tokenizer.ggml.tokens", list)
    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden // heads if heads > 0 else 0)
    bos = _token_id(header, "bos_token_id")
    ends = {key: _token_id(header, key) for key in _END_KEYS}
    eos = ends["eos_token_id"]
    return ModelMetadata(
        name=name,
        model_type=model_type,
        vocab_size=number("vocab_size", len(tokens)),
        hidden_size=hidden,
        intermediate_size=number("feed_forward_length"),
        layers=number("block_count"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=header.get(f"{model_type}.attention.layer_norm_rms_epsilon", float),
        rope_theta=header.get(f"{model_type}.rope.freq_base", float, 10000.0),
        rope_dim=number("rope.dimension_count", head_dim),
        max_context=number("context_length"),
        tie_embeddings="output.weight" not in header.tensors,
        bos_id=bos,
        eos_ids=frozenset(token_id for token_id in ends.values() if token_id is not None),
        add_bos=bos is not None and header.get("tokenizer.ggml.add_bos_token", bool, False),
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
        chat_template=header.get("tokenizer.chat_template", str, "") or None,
        fingerprint=fingerprint(header.raw, [path]),
    ).check(path)


def _token_id(header: GgufHeader, key: str) -> int | None:
    token_id: int = header.get(f"tokenizer.ggml.{key}", int, -1)
    if token_id >= len(header.get("tokenizer.ggml.tokens", list)):
        raise ModelError(f"{header.path}: tokenizer.ggml.{key} {token_id} is outside the vocabulary")
    return None if token_id < 0 else token_id


def _refuse_unsupported(header: GgufHeader, model_type: str) -> None:
    """A model that needs what is not built would run and answer nonsense."""
    scaling = header.get(f"{model_type}.rope.scaling.type", str, "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        kind = scaling if scaling != "none" else "rope_freqs"
        raise ModelError(f"{header.path}: rope scaling {kind!r} is not supported")
    if header.get(f"{model_type}.expert_count", int, 0):
        raise ModelError(f"{header.path}: mixtures of experts are not supported")
    biased = next((name for name in header.tensors if name.endswith(".bias")), None)
    if biased is not None:
        raise ModelError(f"{header.path}: linear layers with a bias are not supported (tensor {biased})")

"""ModelMetadata from a Hugging Face model directory. Called by model_resolver.py; never reads tensors.

Files: config.json and tokenizer.json; if present generation_config.json, tokenizer_config.json and
chat_template.jinja.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import ModelError
from text.metadata import ModelMetadata, check_model_type, fingerprint
from text.weight_files import read_json


@dataclass(frozen=True, slots=True)
class _JsonFile:
    """A JSON object that knows its file. `null` counts as absent."""

    path: Path
    values: Mapping[str, Any]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value, or `default`. Raises ModelError when it is absent without a default, or no `kind`."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.path} lacks {key}")
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ModelError(f"{self.path}: {key} must be of type {kind.__name__}, not {value!r}")
        return value

    def ids(self, key: str) -> frozenset[int]:
        """The token ids of a key that holds one, a list of them, or null."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int for token_id in ids):
            raise ModelError(f"{self.path}: {key} must be a token id or a list of them, not {value!r}")
        return frozenset(ids)

    def token(self, key: str) -> str:
        """The text of a token that is written as a string or as {"content": ...}; "" when absent."""
        value = self.values.get(key)
        text = value.get("content") if isinstance(value, dict) else "" if value is None else value
        if not isinstance(text, str):
            raise ModelError(f"{self.path}: {key} must be a token's text, not {value!r}")
        return text


def read_hf_metadata(directory: Path, weight_files: tuple[Path, ...], name: str) -> ModelMetadata:
    """Raises ModelError for a missing or invalid file, and for a model that cannot be computed here."""
    config = _json_file(directory / "config.json")
    model_type = config.get("model_type", str)
    check_model_type(model_type, config.path)
    _refuse_unsupported(config)
    tokenizer = _json_file(directory / "tokenizer.json")
    tokenizer_config = _json_file(directory / "tokenizer_config.json", optional=True)
    generation = _json_file(directory / "generation_config.json", optional=True)
    ids = _special_ids(tokenizer)
    bos_token, eos_token = tokenizer_config.token("bos_token"), tokenizer_config.token("eos_token")
    bos_id = ids.get(bos_token, min(config.ids("bos_token_id"), default=None))
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    head_dim = config.get("head_dim", int, hidden // heads if heads > 0 else 0)
    rope = _rope_parameters(config)
    return ModelMetadata(
        name=name,
        model_type=model_type,
        vocab_size=config.get("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=config.get("intermediate_size", int),
        layers=config.get("num_hidden_layers", int),
        heads=heads,
        kv_heads=config.get("num_key_value_heads", int, heads),
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", float, 1e-6),
        rope_theta=rope.get("rope_theta", float, 10000.0),
        rope_dim=int(head_dim * rope.get("partial_rotary_factor", float, 1.0)),
        max_context=config.get("max_position_embeddings", int, 2048),
        tie_embeddings=config.get("tie_word_embeddings", bool, False),
        bos_id=bos_id,
        eos_ids=generation.ids("eos_token_id")
        | config.ids("eos_token_id")
        | frozenset({ids[eos_token]} if eos_token in ids else ()),
        add_bos=bos_id is not None and _adds_bos(tokenizer, tokenizer_config, bos_token),
        bos_token=bos_token,
        eos_token=eos_token,
        chat_template=_chat_template(directory, tokenizer_config),
        fingerprint=fingerprint(config.path.read_bytes(), weight_files),
    ).check(config.path)


def _json_file(path: Path, optional: bool = False) -> _JsonFile:
    return _JsonFile(path, {} if optional and not path.exists() else read_json(path))


def _refuse_unsupported(config: _JsonFile) -> None:
    """A model that needs what is not built would run and answer nonsense."""
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key, bool, False):
            raise ModelError(f"{config.path}: {key} is not supported")
    activation = config.get("hidden_act", str, "silu")
    if activation != "silu":
        raise ModelError(f"{config.path}: hidden_act {activation!r} is not supported; supported: silu")
    if config.values.get("quantization_config") is not None:
        raise ModelError(f"{config.path}: quantised weights (quantization_config) are not supported")


def _rope_parameters(config: _JsonFile) -> _JsonFile:
    """Rotary parameters: in `rope_parameters` (transformers 5) or at the top level with `rope_scaling`."""
    nested = config.get("rope_parameters", dict, {})
    for key, scaling in (("rope_parameters", nested), ("rope_scaling", config.get("rope_scaling", dict, {}))):
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise ModelError(f"{config.path}: rope scaling {kind!r} ({key}) is not supported")
    return _JsonFile(config.path, {**config.values, **nested})


def _special_ids(tokenizer: _JsonFile) -> dict[str, int]:
    """Ids by text: of the vocabulary, and of the added tokens."""
    try:
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", list, [])}
        vocabulary = tokenizer.get("model", dict)["vocab"]
    except (LookupError, TypeError) as error:
        raise ModelError(f"{tokenizer.path}: added_tokens or model is not valid") from error
    return {**vocabulary, **added} if isinstance(vocabulary, dict) else added


def _adds_bos(tokenizer: _JsonFile, tokenizer_config: _JsonFile, bos_token: str) -> bool:
    """What tokenizer_config says, else whether the post-processor's template begins with the BOS token."""
    explicit = tokenizer_config.values.get("add_bos_token")
    if isinstance(explicit, bool):
        return explicit
    processor = tokenizer.get("post_processor", dict, {})
    try:
        steps = [processor, *processor.get("processors", [])]
        firsts = [step["single"][0] for step in steps if step.get("single")]
        return any(first.get("SpecialToken", {}).get("id") == bos_token for first in firsts)
    except (AttributeError, LookupError, TypeError) as error:
        raise ModelError(f"{tokenizer.path}: post_processor is not valid") from error


def _chat_template(directory: Path, tokenizer_config: _JsonFile) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json; of several named templates "default" is taken."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
    value = tokenizer_config.values.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{tokenizer_config.path}: chat_template must be text or a list of named templates")
    return value

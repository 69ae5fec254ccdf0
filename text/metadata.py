"""What is known about a model without its tensors.

gguf_metadata.py and hf_metadata.py fill ModelMetadata; router, engine and workers read it. Nothing here
loads weights.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import ModelError
from contracts.seams import plugs

_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Shape, special tokens and identity of a model.

    `max_context` is what the model was trained for. `rope_dim` is the number of leading dimensions of a head
    that are rotated. `eos_ids` joins every end token that any of the model's files names. `add_bos`: a raw
    prompt starts with `bos_id`. `bos_token` and `eos_token` are what a chat template writes ("": none).
    `fingerprint` is equal for equal configuration and weights.
    """

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_dim: int
    max_context: int
    tie_embeddings: bool
    bos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    bos_token: str
    eos_token: str
    chat_template: str | None
    fingerprint: str

    def check(self, source: Path) -> "ModelMetadata":
        """Self, or ModelError naming `source` and the first value that cannot be right."""
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "rope_dim",
        )
        for name in (*sizes, "max_context", "rms_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ModelError(f"{source}: {name} must be above 0, not {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ModelError(f"{source}: {self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            raise ModelError(f"{source}: rope_dim {self.rope_dim} does not fit head_dim {self.head_dim}")
        for token_id in self.eos_ids | ({self.bos_id} if self.bos_id is not None else set()):
            if not 0 <= token_id < self.vocab_size:
                raise ModelError(
                    f"{source}: special token id {token_id} is outside the vocabulary of {self.vocab_size}"
                )
        return self


def check_model_type(model_type: str, source: Path) -> None:
    """Raises ModelError naming the model types that work when `model_type` is not one of them."""
    known = plugs("model")
    if model_type not in known:
        raise ModelError(f"{source}: model type {model_type!r} is not supported; supported: {', '.join(known)}")


def fingerprint(configuration: bytes, weight_files: Sequence[Path]) -> str:
    """Identity of a model: its configuration, and per weight file the size and evenly spaced samples.

    Reads at most 256 KiB a file, so that a start stays fast whatever the model's size. File names do not
    count: a copy under another name is the same model.
    """
    digest = hashlib.blake2b(configuration, digest_size=16)
    for path in weight_files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as stream:
            for index in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()

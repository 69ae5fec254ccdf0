"""Weights from safetensors files, sharded or not. The torch runner opens them for Hugging Face directories."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from contracts.errors import ModelError

_DTYPES = {"F32", "F16", "BF16"}


class SafetensorsSource:
    """A TensorSource over one or more files; names may come with or without the `model.` prefix."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises ModelError naming a file that cannot be read."""
        self._where: dict[str, tuple[Any, str]] = {}
        for file in files:
            try:
                shard: Any = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read the weights in {file}: {error}") from error
            self._where.update((_with_prefix(name), (shard, name)) for name in shard.keys())  # noqa: SIM118 (no dict)

    @property
    def names(self) -> Collection[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        dtype = self._slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ModelError(f"tensor {name} is stored as {dtype}; supported: {', '.join(sorted(_DTYPES))}")
        shard, own_name = self._where[name]
        tensor: torch.Tensor = shard.get_tensor(own_name)
        return tensor.clone()

    def _slice(self, name: str) -> Any:
        shard, own_name = self._where[name]
        return shard.get_slice(own_name)


def _with_prefix(name: str) -> str:
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"

"""The weights of a model, asked for by name and shape. Models take what they need from it.

Which file format they come from is a TensorSource (gguf.py, safetensors.py). It never invents a tensor:
what is missing, of another shape or not understood is a ModelError that names it.
"""

from collections.abc import Collection
from typing import Protocol

import torch

from contracts.errors import ModelError


class TensorSource(Protocol):
    """Tensors under the names of Hugging Face checkpoints, with the `model.` prefix."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is in `names`, without reading it."""

    def read(self, name: str) -> torch.Tensor:
        """The values, contiguous, of any floating-point dtype, in memory of their own: mapped memory would fault
        when somebody cuts the file short. Raises ModelError."""


class Checkpoint:
    """Hands out each tensor in the dtype of the computation, and knows which ones were taken."""

    def __init__(self, source: TensorSource, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype
        self._taken: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, contiguous. Raises ModelError when it is missing or has another shape."""
        if name not in self._source.names:
            raise ModelError(f"the model's weights lack the tensor {name}")
        found = self._source.shape(name)
        if found != shape:
            raise ModelError(f"tensor {name} has shape {found}, but the configuration says {shape}")
        self._taken.add(name)
        return self._source.read(name).to(self._dtype)

    def refuse_unused(self, known: tuple[str, ...]) -> None:
        """Raises ModelError when a tensor was not taken, unless its name ends in one of `known`: a model that
        ignores a bias or a rotary scale computes nonsense."""
        unused = sorted(name for name in self._source.names if name not in self._taken and not name.endswith(known))
        if unused:
            raise ModelError(f"the model's weights hold {unused[0]}, which this model type does not use")

"""Pieces that model families share: RMS normalisation and rotary positions. Plain functions on tensors."""

import torch
from torch.nn.functional import rms_norm

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [tokens, 1, dim / 2] of the tokens of a step."""


def normalise(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in float32 (Zhang and Sennrich, 2019)."""
    return rms_norm(hidden.float(), weight.shape, eps=eps).to(hidden.dtype) * weight


class RotaryTable:
    """Rotary position embedding (Su et al., 2021) in the half-split order of Hugging Face checkpoints.

    One table, indexed by position. Frequencies and angles are rounded to float32 as in Hugging Face
    transformers: an exact table would move logits away from its results by more the longer the context is.
    """

    def __init__(self, theta: float, dim: int, max_context: int) -> None:
        frequencies = (theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)).float()
        angles = (torch.arange(max_context).float().unsqueeze(1) * frequencies).double()
        self._cos = angles.cos().float().unsqueeze(1)  # [max_context, 1, dim / 2]
        self._sin = angles.sin().float().unsqueeze(1)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of each of `positions` [tokens]."""
        return self._cos[positions], self._sin[positions]


def rotate(states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Queries or keys [tokens, heads, dim] turned to their positions, computed in float32."""
    cos, sin = rotation
    first, second = states.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(states.dtype)

"""The seam for paged attention. A plug's module has `create()`."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One sequence in the flat batch: its queries are rows [first, first + count) of the flat tensors and
    stand at positions start..start+count-1; `blocks` is an int64 tensor of its blocks, in order, that
    covers positions 0..start+count-1."""

    first: int
    count: int
    start: int
    blocks: torch.Tensor


class Attention(Protocol):
    """Causal grouped-query attention over a block table."""

    def write(self, layer_pool: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Store keys and values [tokens, kv_heads, dim] at `slots` [tokens] (block * block_size + offset) of
        layer_pool [blocks, 2, kv_heads, block_size, dim] (a strided view)."""

    def attend(
        self, layer_pool: torch.Tensor, queries: torch.Tensor, rows: list[AttentionRow], scale: float
    ) -> torch.Tensor:
        """Outputs [tokens, heads, dim] of queries [tokens, heads, dim]. Each row's result is independent of
        the other rows."""

"""Attention in plain torch: gather a row's blocks, then scaled dot-product attention.

The runner loads it as `engine.attention = "reference"`. It is the yardstick of the other plugs: simple
first. Rows are computed one by one, so none depends on another.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.base import AttentionRow


class ReferenceAttention:
    """See engine/attention/base.py for the contract."""

    def write(self, layer_pool: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        block_size = layer_pool.shape[3]
        blocks, offsets = slots // block_size, slots % block_size
        layer_pool[:, 0][blocks, :, offsets] = keys
        layer_pool[:, 1][blocks, :, offsets] = values

    def attend(
        self, layer_pool: torch.Tensor, queries: torch.Tensor, rows: list[AttentionRow], scale: float
    ) -> torch.Tensor:
        output = torch.empty_like(queries)
        for row in rows:
            span = slice(row.first, row.first + row.count)
            output[span] = _attend_row(layer_pool, queries[span], row, scale)
        return output


def _attend_row(layer_pool: torch.Tensor, queries: torch.Tensor, row: AttentionRow, scale: float) -> torch.Tensor:
    _, _, kv_heads, _, dim = layer_pool.shape
    count, heads, _ = queries.shape
    length = row.start + count
    # One copy: [2, kv_heads, blocks, block_size, dim] comes out contiguous, the blocks one after the other.
    gathered = layer_pool.permute(1, 2, 0, 3, 4).index_select(2, row.blocks)
    keys, values = gathered.view(2, 1, kv_heads, -1, dim)[:, :, :, :length]
    if count == 1:
        # The query heads that share a KV head stand as queries of it: [1, kv_heads, group, dim].
        grouped = queries.view(1, kv_heads, heads // kv_heads, dim)
        return scaled_dot_product_attention(grouped, keys, values, scale=scale).reshape(1, heads, dim)
    mask = None
    if row.start:
        mask = torch.arange(length) <= torch.arange(row.start, length).unsqueeze(1)
    result = scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return result.squeeze(0).transpose(0, 1)


def create() -> ReferenceAttention:
    """The plug."""
    return ReferenceAttention()

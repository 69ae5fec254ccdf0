"""The pool: blocks as bytes and as tensors are the same memory."""

from dataclasses import replace

import pytest
import torch

from contracts.kv import SPARE_BLOCKS, KvLayout
from engine.kv_pool import KvPool

LAYOUT = KvLayout("m", "t", "n", "float32", layers=3, kv_heads=2, head_dim=4, block_size=5, rope="r")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_is_one_piece_over_all_layers(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    source, target = KvPool(layout, 4), KvPool(layout, 4)
    for layer in range(layout.layers):
        source.layer(layer)[2] = torch.randn(2, 2, 5, 4)
    assert source.layer(0).shape == (4, 2, 2, 5, 4)
    target.writable(1)[:] = source.read(2)
    for layer in range(layout.layers):
        assert torch.equal(target.layer(layer)[1], source.layer(layer)[2])
        assert not target.layer(layer)[[0, 2, 3]].any()


def test_read_is_a_read_only_view() -> None:
    pool = KvPool(LAYOUT, 2)
    block = pool.read(1)
    assert block.readonly
    assert block.nbytes == LAYOUT.block_bytes
    pool.layer(0)[1, 0, 0, 0, 0] = 1.0
    assert bytes(block[:4]) == b"\x00\x00\x80\x3f"


def test_attention_does_not_see_the_spare_blocks() -> None:
    pool = KvPool(LAYOUT, 2)
    for spare in range(2, 2 + SPARE_BLOCKS):
        pool.writable(spare)[:] = b"\xff" * LAYOUT.block_bytes  # NaN
    assert pool.blocks == 2
    assert pool.layer(1).shape[0] == 2
    assert not torch.isnan(pool.layer(1)).any()


def test_a_closed_pool_leaves_what_was_lent_in_place() -> None:
    """A step or a copy in another thread may still be at it."""
    pool = KvPool(LAYOUT, 2)
    block = pool.writable(1)
    pool.close()
    pool.close()
    block[:] = b"x" * LAYOUT.block_bytes
    with pytest.raises(AssertionError):
        pool.read(1)

"""The pool: blocks as bytes and as tensors are the same memory."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from contracts.errors import StartupError
from contracts.kv import KvLayout
from engine.kv_pool import KvPool

LAYOUT = KvLayout("m", "t", "n", "float32", layers=3, kv_heads=2, head_dim=4, block_size=5, rope="r")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_is_one_piece_over_all_layers(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    source, target = KvPool(layout, 4), KvPool(layout, 4)
    for layer in range(layout.layers):
        source.layer(layer)[2] = torch.randn(2, 2, 5, 4)
    assert source.layer(0).shape == (4, 2, 2, 5, 4)
    target.write(1, source.read(2))
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


def test_write_refuses_another_size() -> None:
    pool = KvPool(LAYOUT, 2)
    with pytest.raises(ValueError, match=str(LAYOUT.block_bytes)):
        pool.write(0, bytes(LAYOUT.block_bytes - 1))


@pytest.mark.parametrize("block", [-1, 2])
def test_a_block_outside_the_pool_is_our_fault(block: int) -> None:
    with pytest.raises(AssertionError):
        KvPool(LAYOUT, 2).read(block)


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_unused_blocks_cost_no_memory() -> None:
    before = resident_bytes()
    pool = KvPool(LAYOUT, (512 << 20) // LAYOUT.block_bytes)
    assert not torch.isnan(pool.layer(2)[pool.blocks - 1]).any()
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("blocks", [1 << 45, 1 << 70])
def test_a_pool_that_does_not_fit_says_how_large_it_is(blocks: int) -> None:
    with pytest.raises(StartupError, match=r"GiB for \d+ KV blocks"):
        KvPool(LAYOUT, blocks)

"""The pool's memory: all there from the start, writable by its owner only, gone after close."""

import gc
import mmap
import os
import resource
from pathlib import Path

import pytest

from contracts.errors import StartupError
from contracts.kv import SPARE_BLOCKS, KvLayout
from engine.pool_memory import PoolMemory

LAYOUT = KvLayout("m", "t", "n", "float32", layers=3, kv_heads=2, head_dim=4, block_size=5, rope="r")
ALL = range(4 + SPARE_BLOCKS)


def mapped() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:pdserve-kv" in line]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_blocks_are_zero_and_lie_one_behind_the_other() -> None:
    memory = PoolMemory(LAYOUT, 4)
    assert memory.blocks == 4
    assert all(memory.read(block) == bytes(LAYOUT.block_bytes) for block in ALL)
    for block in ALL:
        memory.writable(block)[:] = bytes([block + 1]) * LAYOUT.block_bytes
    whole = b"".join(bytes([block + 1]) * LAYOUT.block_bytes for block in ALL)
    assert memory.array.tobytes() == whole
    assert os.pread(memory.descriptor, len(whole) + 1, 0) == whole
    assert memory.read(0).readonly
    memory.close()


@pytest.mark.parametrize("block", [-1, 4 + SPARE_BLOCKS])
def test_a_block_outside_the_pool_is_our_fault(block: int) -> None:
    memory = PoolMemory(LAYOUT, 4)
    with pytest.raises(AssertionError):
        memory.read(block)
    with pytest.raises(AssertionError):
        memory.writable(block)


def test_all_memory_is_there_before_the_first_write() -> None:
    memory = PoolMemory(LAYOUT, (8 << 20) // LAYOUT.block_bytes)
    assert os.fstat(memory.descriptor).st_blocks * 512 >= memory.array.nbytes
    memory.close()


def test_others_can_map_it_only_to_read() -> None:
    memory = PoolMemory(LAYOUT, 4)
    size = memory.array.nbytes
    with pytest.raises(PermissionError):
        mmap.mmap(memory.descriptor, size)
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    for other in (size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.truncate(memory.descriptor, other)
    again = os.open(f"/proc/self/fd/{memory.descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, size)
    os.close(again)
    with mmap.mmap(memory.descriptor, size, access=mmap.ACCESS_READ) as theirs:
        memory.writable(1)[:] = b"y" * LAYOUT.block_bytes
        assert theirs[LAYOUT.block_bytes : 2 * LAYOUT.block_bytes] == b"y" * LAYOUT.block_bytes
    memory.close()


@pytest.mark.parametrize("end", ["close", "garbage"])
def test_nothing_is_left(end: str) -> None:
    gc.collect()  # pools of other tests
    files, maps = open_files(), mapped()
    memory = PoolMemory(LAYOUT, 4)
    assert len(mapped()) == len(maps) + 1
    if end == "close":
        memory.close()
        memory.close()
        with pytest.raises(AssertionError):
            _ = memory.descriptor
    else:
        del memory
    assert open_files() == files
    assert mapped() == maps


@pytest.mark.parametrize("blocks", [1 << 36, 1 << 45, 1 << 70])
def test_a_pool_that_does_not_fit_says_how_large_it_is(blocks: int) -> None:
    with pytest.raises(StartupError, match=r"GiB for \d+ KV blocks"):
        PoolMemory(LAYOUT, blocks)


def test_what_the_system_refuses_leaves_nothing() -> None:
    files, limits = open_files(), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), limits[1]))
    try:
        with pytest.raises(StartupError, match="Cannot allocate memory") as refused:
            PoolMemory(LAYOUT, (64 << 20) // LAYOUT.block_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert open_files() == files
    assert "lower kv.memory or kv.blocks" in str(refused.value)

"""The shared_memory transport between two real processes, one of which dies."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from contracts.config import TransferConfig
from contracts.kv import KvLayout
from engine.pool_memory import PoolMemory
from kv_transfer.frames import checksum
from kv_transfer.transports import shared_memory
from kv_transfer.transports.base import Inlet, Packed
from protos.links.base import LinkClosed
from tests.helpers.processes import kill_and_wait

BLOCKS = 256
LAYOUT = KvLayout("model", "tokenizer", "numerics", "uint64", 1, 1, 1, 65536, "rope")  # 1 MiB a block
CONFIG = TransferConfig()
ALL = range(BLOCKS)


def export(pipe: Pipe) -> None:
    """A process that serves a pool, tells its address and one Chunk of all blocks, and lives as long as the pipe."""

    async def main() -> None:
        pool = PoolMemory(LAYOUT, BLOCKS)
        pool.array[:] = np.random.default_rng(5).integers(0, 256, pool.array.shape, np.uint8)
        transport = shared_memory.create(pool, CONFIG)
        address = await transport.serve("127.0.0.1")
        pipe.send((address, await transport.outlet(b"").pack(ALL)))
        await asyncio.to_thread(pipe.poll, None)
        await transport.close()
        pool.close()

    asyncio.run(main())


@dataclass(frozen=True)
class Exporter:
    process: BaseProcess
    pid: int
    address: str
    packed: Packed


@contextmanager
def exporting() -> Iterator[Exporter]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=export, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(60)
        address, packed = here.recv()
        assert process.pid is not None
        yield Exporter(process, process.pid, address, packed)
    finally:
        here.close()
        process.join(30)
        assert process.exitcode is not None


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    made = PoolMemory(LAYOUT, BLOCKS)
    yield made
    made.close()


async def test_bytes_arrive_and_no_file_is_ever_seen(pool: PoolMemory) -> None:
    with exporting() as exporter:
        puller = shared_memory.create(pool, CONFIG)
        inlet = await (await puller.connect(exporter.address)).inlet()
        assert "memfd:pdserve-kv" in Path(f"/proc/{exporter.pid}/maps").read_text()
        assert not any(Path("/dev/shm").glob("*pdserve*"))
        assert await inlet.accept(exporter.packed.payload, ALL) == exporter.packed.checksums
        assert tuple(checksum(pool.read(block)) for block in ALL) == exporter.packed.checksums
        await puller.close()
    assert exporter.process.exitcode == 0
    assert not any(Path("/dev/shm").glob("*pdserve*"))


async def copy_until_it_closes(inlet: Inlet, payload: bytes) -> AsyncIterator[tuple[int, ...]]:
    with suppress(LinkClosed):
        while True:
            yield await inlet.accept(payload, ALL)


async def test_an_exporter_killed_in_the_middle_leaves_a_whole_copy_or_none(pool: PoolMemory) -> None:
    with exporting() as exporter:
        puller = shared_memory.create(pool, CONFIG)
        inlet = await (await puller.connect(exporter.address)).inlet()
        killing = asyncio.ensure_future(asyncio.to_thread(kill_and_wait, exporter.pid))
        copies = [sums async for sums in copy_until_it_closes(inlet, exporter.packed.payload)]
        await killing
        assert set(copies) == {exporter.packed.checksums}
        with pytest.raises(LinkClosed):
            await puller.connect(exporter.address)
        await puller.close()


def shared_bytes() -> int:
    """Of the whole machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:")) * 1024


async def test_the_last_process_frees_the_memory(pool: PoolMemory) -> None:
    size = pool.array.nbytes
    with exporting() as exporter:
        puller = shared_memory.create(pool, CONFIG)
        connection = await puller.connect(exporter.address)
        before = shared_bytes()
        kill_and_wait(exporter.pid)
        assert before - shared_bytes() < size // 2  # we still hold it
        await connection.close()
        assert before - shared_bytes() > size // 2
        await puller.close()

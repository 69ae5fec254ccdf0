"""What only the shared_memory transport does; the rest is in tests/conformance/test_transports.py."""

import asyncio
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.config import TransferConfig
from contracts.errors import Corrupt, StartupError
from contracts.kv import SPARE_BLOCKS, BlockStore
from kv_transfer.channels.descriptor_desk import DescriptorDesk, Shape
from kv_transfer.transports import shared_memory
from kv_transfer.transports.base import Transport
from protos.links.base import LinkClosed
from tests.helpers.handover import ByteStore
from tests.helpers.transport_ends import BLOCKS, LAYOUT, TransportEnds, bounded

CONFIG = TransferConfig()
SIZE = (BLOCKS + SPARE_BLOCKS) * LAYOUT.block_bytes


@pytest.fixture
async def ends() -> AsyncIterator[TransportEnds]:
    made = TransportEnds("shared_memory")
    with bounded():
        yield made
        await made.close()


class GatedStore(ByteStore):
    """Its `read`, which hashing begins with, waits until the gate is open."""

    def __init__(self) -> None:
        super().__init__(BLOCKS, layout=LAYOUT)
        self.gate = threading.Event()
        self.loop = asyncio.get_running_loop()
        self.reading = asyncio.Event()

    def read(self, block: int) -> memoryview:
        self.loop.call_soon_threadsafe(self.reading.set)
        self.gate.wait()
        return super().read(block)


async def gated_accept(ends: TransportEnds) -> tuple[GatedStore, Transport, asyncio.Task[tuple[int, ...]]]:
    """A receive of blocks 1 and 2 that has written the first and waits before the second."""
    store = GatedStore()
    puller = shared_memory.create(store, CONFIG)
    connection = await puller.connect(await ends.exporter.serve(""))
    packed = await ends.exporter.outlet(b"").pack([1, 2])
    task = asyncio.ensure_future((await connection.inlet()).accept(packed.payload, [1, 2]))
    await store.reading.wait()
    return store, puller, task


async def test_a_cancelled_accept_ends_when_the_thread_does(ends: TransportEnds) -> None:
    store, puller, accepting = await gated_accept(ends)
    for _ in range(3):
        accepting.cancel()
        done, _ = await asyncio.wait({accepting}, timeout=0.02)
        assert not done  # the thread may still write
    assert store.data[1] == ends.here.read(1)
    assert not any(store.data[2])
    store.gate.set()
    await asyncio.wait({accepting})
    assert accepting.cancelled()
    assert store.data[2] == ends.here.read(2)
    await puller.close()


async def test_the_loop_goes_on_while_blocks_are_copied(ends: TransportEnds) -> None:
    store, puller, accepting = await gated_accept(ends)
    turns = 0
    while turns < 1000:
        await asyncio.sleep(0)
        turns += 1
    assert not accepting.done()
    store.gate.set()
    assert len(await accepting) == 2
    await puller.close()


async def test_a_mapping_in_use_is_kept_until_the_copy_ends(ends: TransportEnds) -> None:
    store, puller, accepting = await gated_accept(ends)
    closing = asyncio.ensure_future(puller.close())
    done, _ = await asyncio.wait({closing}, timeout=0.02)
    assert not done
    store.gate.set()
    await closing
    assert len(await accepting) == 2


async def test_a_dead_exporters_memory_goes_with_the_last_connection(ends: TransportEnds) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")

    before = mapped()
    connection = await ends.puller.connect(await ends.exporter.serve(""))
    assert mapped() == before + 1
    await ends.exporter.close()
    assert mapped() == before + 1
    await connection.close()
    assert mapped() == before


@pytest.mark.parametrize("numbers", [(BLOCKS + SPARE_BLOCKS, 1), (1, 0xFFFFFFFF)])
async def test_a_number_that_is_none_of_the_exporters_is_corrupt(ends: TransportEnds, numbers: tuple[int, ...]) -> None:
    inlet = await (await ends.puller.connect(await ends.exporter.serve(""))).inlet()
    with pytest.raises(Corrupt, match=str(max(numbers))):
        await inlet.accept(struct.pack("<2I", *numbers), [1, 2])
    assert not ends.there.array.any()


async def test_a_pool_that_is_no_file_cannot_be_served() -> None:
    transport = shared_memory.create(ByteStore(), CONFIG)
    with pytest.raises(StartupError, match="shared_memory"):
        await transport.serve("")
    await transport.close()


async def test_blocks_of_another_size_are_refused_with_both(ends: TransportEnds) -> None:
    store: BlockStore = ByteStore(layout=replace(LAYOUT, block_size=2 * LAYOUT.block_size))
    puller = shared_memory.create(store, CONFIG)
    with pytest.raises(LinkClosed, match=f"{store.layout.block_bytes} here, {LAYOUT.block_bytes} there"):
        await puller.connect(await ends.exporter.serve(""))
    await puller.close()


def unsealed() -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, SIZE)
    return descriptor


def sealed(size: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def short() -> int:
    return sealed(SIZE - mmap.PAGESIZE)


def long() -> int:
    return sealed(SIZE + mmap.PAGESIZE)


def no_memory() -> int:
    return os.open("/dev/null", os.O_RDONLY)


@pytest.mark.parametrize("offered", [unsealed, short, long, no_memory])
async def test_what_is_no_such_pool_is_not_mapped(ends: TransportEnds, offered: Callable[[], int]) -> None:
    """To read behind the end of a file is a SIGBUS, which would end this process."""
    descriptor = offered()
    desk = DescriptorDesk(descriptor, Shape(BLOCKS + SPARE_BLOCKS, LAYOUT.block_bytes))
    with pytest.raises(LinkClosed):
        await ends.puller.connect(desk.address)
    await desk.close()
    os.close(descriptor)


async def test_the_pool_is_mapped_read_only(ends: TransportEnds) -> None:
    await ends.puller.connect(await ends.exporter.serve(""))
    modes = [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:pdserve" in line]
    assert modes.count("r--s") == 1

"""Two workers' ends of one transport over pools of shareable memory, without links or engines."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from contracts.config import TransferConfig
from contracts.kv import SPARE_BLOCKS, KvLayout
from contracts.seams import load_plug
from engine.pool_memory import PoolMemory
from kv_transfer.transports.base import Inlet, Outlet, Packed, Transport

BLOCKS = 64
LAYOUT = KvLayout("model", "tokenizer", "numerics", "uint64", 1, 1, 1, 512, "rope")  # 8 KiB a block
LAST_SPARE = BLOCKS + SPARE_BLOCKS - 1


@contextmanager
def bounded(seconds: float = 60.0) -> Iterator[None]:
    """What hangs on this loop fails instead, also the test that a fixture stands round: it is cancelled."""
    timer = asyncio.get_running_loop().call_later(seconds, lambda: [task.cancel() for task in asyncio.all_tasks()])
    try:
        yield
    finally:
        timer.cancel()


class TransportEnds:
    """The exporter's blocks hold random bytes, the puller's are zero."""

    def __init__(self, plug: str, layout: KvLayout = LAYOUT) -> None:
        config = TransferConfig(transport=plug)
        self.here, self.there = PoolMemory(layout, BLOCKS), PoolMemory(layout, BLOCKS)
        self.here.array[:] = np.random.default_rng(7).integers(0, 256, self.here.array.shape, np.uint8)
        self.exporter: Transport = load_plug("transport", plug).create(self.here, config)
        self.puller: Transport = load_plug("transport", plug).create(self.there, config)

    async def close(self) -> None:
        """Everything is gone when it returns."""
        await self.puller.close()
        await self.exporter.close()
        self.here.close()
        self.there.close()

    async def move(self, outlet: Outlet, inlet: Inlet, sources: Sequence[int], targets: Sequence[int]) -> Packed:
        """One chunk, as exporter and receiver do it; it must arrive."""
        packed = await outlet.pack(sources)
        assert await push_and_accept(outlet, inlet, packed.payload, sources, targets) == packed.checksums
        for source, target in zip(sources, targets, strict=True):
            assert self.there.read(target) == self.here.read(source)
        return packed


async def push_and_accept(
    outlet: Outlet, inlet: Inlet, payload: bytes, sources: Sequence[int], targets: Sequence[int]
) -> tuple[int, ...]:
    """Both at once, as in two processes."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outlet.push(sources))
        accepting = tasks.create_task(inlet.accept(payload, targets))
    return accepting.result()

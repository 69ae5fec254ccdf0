"""Copies of an inline transport that take time and cannot be stopped, like those of a device's copy engine."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kv_transfer.transports.base import Packed
from worker.host import WorkerHost


class _SlowCopies:
    """Each copy happens in the middle of its time, which is a tenth of `seconds`, or those, or ten times as much. See
    Outlet.pack and Inlet.accept."""

    def __init__(
        self,
        pack: Callable[[Sequence[int]], Awaitable[Packed]],
        accept: Callable[[bytes, Sequence[int]], Awaitable[tuple[int, ...]]],
        seconds: float,
    ) -> None:
        self._pack = pack
        self._accept = accept
        self._seconds = seconds
        self._dice = random.Random(0)

    async def pack(self, blocks: Sequence[int]) -> Packed:
        half = self._half()
        await asyncio.sleep(half)
        packed = await self._pack(blocks)
        await asyncio.sleep(half)
        return packed

    async def accept(self, payload: bytes, blocks: Sequence[int]) -> tuple[int, ...]:
        """When it is cancelled it ends only after its copy."""
        copying = asyncio.create_task(self._copy(payload, blocks))
        try:
            return await asyncio.shield(copying)
        finally:
            await asyncio.wait({copying})

    async def _copy(self, payload: bytes, blocks: Sequence[int]) -> tuple[int, ...]:
        half = self._half()
        await asyncio.sleep(half)
        checksums = await self._accept(payload, blocks)
        await asyncio.sleep(half)
        return checksums

    def _half(self) -> float:
        return self._seconds / 2 * self._dice.choice((0.1, 1.0, 10.0))


def slow_down(host: WorkerHost, seconds: float) -> None:
    """Every copy of this worker, whose links are memory, takes about so long from here on."""
    role: Any = host._role
    end = role._hand_over._transports["memory"]._ends
    slow = _SlowCopies(end.pack, end.accept, seconds)
    end.pack, end.accept = slow.pack, slow.accept

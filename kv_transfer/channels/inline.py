"""Block bytes inside the Chunk itself: what transports/memory.py and transports/grpc.py have in common."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from contracts.errors import Corrupt, HandoverFailed
from contracts.kv import BlockStore
from kv_transfer.frames import checksum
from kv_transfer.transports.base import Inlet, Outlet, Packed


class InlineEnds(Outlet, Inlet, Protocol):
    """Outlet and inlet in one: without channels a hand-over has no state of its own."""

    def close(self, *, reuse: bool = False) -> None:
        """Nothing is held."""


class InlineTransport:
    """See Transport. The link is all it needs, so it is its own connection too. `on_close` frees what `ends` use."""

    def __init__(self, ends: InlineEnds, on_close: Callable[[], Awaitable[None]] | None = None) -> None:
        self._ends = ends
        self._on_close = on_close

    async def serve(self, host: str) -> str:
        """Nothing listens."""
        return ""

    def outlet(self, channel: bytes) -> InlineEnds:
        """Raises HandoverFailed when the Pull names a channel."""
        if channel:
            raise HandoverFailed("this transport has no channels")
        return self._ends

    async def connect(self, address: str) -> "_InlineConnection":
        """Nothing to connect to."""
        return _InlineConnection(self._ends)

    async def close(self) -> None:
        """Idempotent when `on_close` is."""
        if self._on_close is not None:
            await self._on_close()


class _InlineConnection:
    """See Connection."""

    def __init__(self, ends: InlineEnds) -> None:
        self._ends = ends

    async def inlet(self) -> InlineEnds:
        """Nothing to open."""
        return self._ends

    async def close(self) -> None:
        """Nothing is held."""


class InlineEnd:
    """InlineEnds on the event loop, so also in virtual time. The payload is a copy of the blocks' bytes, one block
    after the other."""

    channel = b""

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    async def pack(self, blocks: Sequence[int]) -> Packed:
        """One copy."""
        views = [self._store.read(block) for block in blocks]
        return Packed(b"".join(views), tuple(checksum(view) for view in views))

    async def push(self, blocks: Sequence[int]) -> None:
        """Everything is in the payload."""

    async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
        """One copy. Raises Corrupt before anything is written when the size differs."""
        return write_blocks(self._store, payload, blocks)

    def close(self, *, reuse: bool = False) -> None:
        """Nothing is held."""


def write_blocks(store: BlockStore, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
    """Write the payload into these blocks and hash each while it is in the core's cache. Raises Corrupt before
    anything is written when the size differs."""
    size = store.layout.block_bytes
    if len(payload) != size * len(blocks):
        raise Corrupt(f"{len(blocks)} blocks are {size * len(blocks)} bytes, {len(payload)} came")
    view = np.frombuffer(payload, np.uint8)
    checksums = []
    for index, block in enumerate(blocks):
        np.copyto(np.frombuffer(store.writable(block), np.uint8), view[index * size : (index + 1) * size])
        checksums.append(checksum(store.read(block)))
    return tuple(checksums)

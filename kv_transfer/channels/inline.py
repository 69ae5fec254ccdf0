"""Block bytes inside the Chunk itself: what transports/memory.py and transports/grpc.py have in common."""

from collections.abc import Sequence

from contracts.errors import Corrupt, HandoverFailed
from contracts.kv import BlockStore
from kv_transfer.frames import checksum
from kv_transfer.transports.base import Packed


class InlineTransport:
    """See Transport. The payload is the blocks' bytes, one block after the other, so the link is all it needs: it is
    its own connection too."""

    def __init__(self, store: BlockStore) -> None:
        self._end = InlineEnd(store)

    async def serve(self, host: str) -> str:
        """Nothing listens."""
        return ""

    def outlet(self, channel: bytes) -> "InlineEnd":
        """Raises HandoverFailed when the Pull names a channel."""
        if channel:
            raise HandoverFailed("this transport has no channels")
        return self._end

    async def connect(self, address: str) -> "InlineTransport":
        """Nothing to connect to."""
        return self

    async def inlet(self) -> "InlineEnd":
        """Nothing to open."""
        return self._end

    async def close(self) -> None:
        """Nothing is held."""


class InlineEnd:
    """Outlet and Inlet of every hand-over: it has no state."""

    channel = b""

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    async def pack(self, blocks: Sequence[int]) -> Packed:
        """One copy."""
        views = [self._store.read(block) for block in blocks]
        return Packed(b"".join(views), tuple(checksum(view) for view in views))

    async def push(self, blocks: Sequence[int]) -> None:
        """Everything is in the payload."""

    async def accept(self, payload: bytes, blocks: Sequence[int]) -> tuple[int, ...]:
        """One copy. Raises Corrupt before anything is written when the size differs."""
        size = self._store.layout.block_bytes
        if len(payload) != size * len(blocks):
            raise Corrupt(f"{len(blocks)} blocks are {size * len(blocks)} bytes, {len(payload)} came")
        view = memoryview(payload)
        for index, block in enumerate(blocks):
            self._store.writable(block)[:] = view[index * size : (index + 1) * size]
        return tuple(checksum(self._store.read(block)) for block in blocks)

    def close(self, *, reuse: bool = False) -> None:
        """Nothing is held."""

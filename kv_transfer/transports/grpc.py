"""Transport over gRPC: the bytes travel in the Chunk, as a field of the link's message.

Copies out of and into the pool, and the hashing, run in threads, so that the event loop has gRPC's own work only. What
arrives is a view of the link's message, so it is copied once.
"""

from collections.abc import Sequence

from contracts.config import TransferConfig
from contracts.kv import BlockStore
from kv_transfer.channels.inline import InlineTransport, write_blocks
from kv_transfer.channels.threads import Threads
from kv_transfer.frames import checksum
from kv_transfer.transports.base import Packed, Transport

_MOST_THREADS = 4


def create(store: BlockStore, config: TransferConfig) -> Transport:
    """It has no options."""
    threads = Threads("grpc", _MOST_THREADS)
    return InlineTransport(_GrpcEnd(store, threads), threads.close)


class _GrpcEnd:
    """See InlineEnds."""

    channel = b""

    def __init__(self, store: BlockStore, threads: Threads) -> None:
        self._store = store
        self._threads = threads

    async def pack(self, blocks: Sequence[int]) -> Packed:
        """One copy. Cancelled, it waits for that."""
        views = [self._store.read(block) for block in blocks]
        return await self._threads.run(lambda: Packed(b"".join(views), tuple(map(checksum, views))))

    async def push(self, blocks: Sequence[int]) -> None:
        """Everything is in the payload."""

    async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
        """One copy. Cancelled, it waits for that."""
        return await self._threads.run(lambda: write_blocks(self._store, payload, blocks))

    def close(self, *, reuse: bool = False) -> None:
        """Nothing is held."""

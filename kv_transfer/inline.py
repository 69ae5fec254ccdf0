"""Block bytes inside the Chunk itself: what transports/memory.py and transports/grpc.py have in common."""

from collections.abc import Sequence

from contracts.errors import Corrupt
from contracts.kv import BlockStore


class InlineTransport:
    """The payload is the blocks' bytes, one block after the other. See Transport."""

    async def pack(self, store: BlockStore, blocks: Sequence[int]) -> bytes:
        """One copy."""
        return b"".join(store.read(block) for block in blocks)

    async def unpack(self, payload: bytes, store: BlockStore, blocks: Sequence[int]) -> None:
        """One copy. Raises Corrupt before anything is written when the size differs."""
        size = store.layout.block_bytes
        if len(payload) != size * len(blocks):
            raise Corrupt(f"{len(blocks)} blocks are {size * len(blocks)} bytes, {len(payload)} came")
        view = memoryview(payload)
        for index, block in enumerate(blocks):
            store.write(block, view[index * size : (index + 1) * size])

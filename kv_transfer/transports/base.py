"""The seam that moves the bytes of KV blocks. Control messages travel on a link (protos/links).

The exporter packs blocks into the payload of a Chunk; the receiver unpacks it into its own blocks and
then verifies its own copy. Each plug's module has `create()`.
"""

from collections.abc import Sequence
from typing import Protocol

from contracts.kv import BlockStore


class Transport(Protocol):
    """How block bytes get from an exporter's store into a receiver's."""

    async def pack(self, store: BlockStore, blocks: Sequence[int]) -> bytes:
        """The payload of a Chunk for these blocks, in order. It must not change when the blocks do."""

    async def unpack(self, payload: bytes, store: BlockStore, blocks: Sequence[int]) -> None:
        """Write the payload's bytes into these blocks, in order. Raises Corrupt when the size differs.
        When it ends, also when it is cancelled, it writes no more: the caller may then let the blocks go."""

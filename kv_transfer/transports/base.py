"""The seam that moves the bytes of KV blocks. Control messages travel on a link (protos/links).

A worker makes one transport of each kind that it uses, over its own pool. The exporter's side serves and opens an
outlet for each Pull; the puller's side connects to an exporter once and opens an inlet for each Pull. For every
Chunk the exporter calls `pack`, sends the Chunk on the link, then calls `push`; the puller calls `accept` with the
Chunk's payload. Each plug's module has `create(store, config)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Packed:
    """What a Chunk says of its blocks: the transport's payload, and one checksum per block of the bytes that the
    exporter's pool holds."""

    payload: bytes
    checksums: tuple[int, ...]


class Outlet(Protocol):
    """The exporter's end of one hand-over."""

    async def pack(self, blocks: Sequence[int]) -> Packed:
        """The payload and checksums of a Chunk of these blocks, in order."""

    async def push(self, blocks: Sequence[int]) -> None:
        """Send what does not travel in the payload; the Chunk is on its way already. Raises LinkClosed. Cancelling
        it leaves nothing that still reads the blocks."""

    def close(self) -> None:
        """The hand-over is over, however it ended. What was sent in part can never be taken for the whole: the
        channel breaks then. Idempotent."""


class Inlet(Protocol):
    """The puller's end of one hand-over."""

    @property
    def channel(self) -> bytes:
        """What the Pull must name for the exporter to find its end; b"" where the link is enough."""

    async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
        """Write the blocks of one Chunk into the pool, in order; the checksums of what lies there then, read from
        the pool's own copy. Raises Corrupt when the payload cannot be that of so many blocks, LinkClosed when the
        channel breaks. When it ends, also when it is cancelled, it writes no more: the caller may then let the
        blocks go."""

    def close(self, *, reuse: bool) -> None:
        """The hand-over is over. `reuse`: every byte that was announced has arrived, so the channel may serve
        another one; else it is broken. Idempotent."""


class Connection(Protocol):
    """A puller's way to one exporter."""

    async def inlet(self) -> Inlet:
        """Raises LinkClosed."""

    async def close(self) -> None:
        """Break every channel and free what was mapped. Idempotent."""


class Transport(Protocol):
    """How block bytes get from an exporter's pool into a puller's, and both sides of it in one worker."""

    async def serve(self, host: str) -> str:
        """Exporter: let pullers connect; the address to give to those that have shown the cluster's secret, ""
        where none is needed. It may hold a key of its own: what is not presented with the address is refused.
        Raises StartupError."""

    def outlet(self, channel: bytes) -> Outlet:
        """Exporter: the end of a hand-over whose Pull named this channel. Raises HandoverFailed when there is no
        such channel."""

    async def connect(self, address: str) -> Connection:
        """Puller: reach the exporter that gave this address. Raises LinkClosed when it cannot be reached, e.g.
        from another machine; bounded in time."""

    async def close(self) -> None:
        """Stop serving and break every channel. Idempotent."""

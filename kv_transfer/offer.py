"""The ways that an exporter offers to its blocks: its transports, and the set-up of a link to a puller.

The exporter owns it. It decides nothing about exports; it must never send a block of the pool, only the pattern in
the spare block behind it.
"""

import asyncio
import secrets
from collections.abc import Mapping

from contracts.errors import HandoverFailed, Incompatible
from contracts.handover import Chunk, Endpoint, ExporterMessage, Introduce, Introduced, Probe, PullerMessage, PullFailed
from contracts.kv import BlockStore
from kv_transfer.handshake import Handshake
from kv_transfer.transports.base import Outlet, Transport
from protos.links.base import Duplex
from protos.patience import receive_within

PROBE_CHUNKS = 8
"""Chunks of one block that answer a Probe: enough to tell a rate, little enough to hurt nobody."""


class Offer:
    """The exporter's side of every link of one worker."""

    def __init__(self, handshake: Handshake, store: BlockStore, transports: Mapping[str, Transport]) -> None:
        self._handshake = handshake
        self._store = store
        self._transports = transports
        self._endpoints: tuple[Endpoint, ...] = ()

    async def open(self, host: str) -> None:
        """Let pullers connect. Raises StartupError."""
        size = self._store.layout.block_bytes
        self._store.writable(self._store.blocks)[:] = secrets.token_bytes(size)
        self._endpoints = tuple(
            [Endpoint(name, await transport.serve(host)) for name, transport in self._transports.items()]
        )

    async def close(self) -> None:
        """Break every channel. Idempotent."""
        for transport in self._transports.values():
            await transport.close()

    def outlet(self, transport: str, channel: bytes) -> Outlet:
        """The end of a hand-over. Raises Incompatible naming both values, HandoverFailed for an unknown channel."""
        if transport not in self._transports:
            raise Incompatible(f"transport: {', '.join(self._transports)} here, {transport!r} asked for")
        return self._transports[transport].outlet(channel)

    async def set_up(
        self, stream: Duplex[ExporterMessage, PullerMessage], introduce: Introduce, silence_seconds: float
    ) -> None:
        """Answer an Introduce and the Probes after it, until the puller has seen enough. Raises LinkClosed, and
        TimeoutError when it says, or takes, nothing for so long."""
        try:
            self._handshake.check(introduce)
        except HandoverFailed as refused:
            await stream.send(PullFailed(refused.info()))
            return
        await stream.send(Introduced(self._endpoints))
        while isinstance(probe := await receive_within(stream, silence_seconds), Probe):
            try:
                await self._answer(stream, probe, silence_seconds)
            except HandoverFailed as refused:
                await stream.send(PullFailed(refused.info()))

    async def _answer(
        self, stream: Duplex[ExporterMessage, PullerMessage], probe: Probe, silence_seconds: float
    ) -> None:
        outlet = self.outlet(probe.transport, probe.channel)
        pattern = [self._store.blocks]
        try:
            for number in range(PROBE_CHUNKS):
                async with asyncio.timeout(silence_seconds):
                    packed = await outlet.pack(pattern)
                    await stream.send(Chunk(number, 1, packed.checksums, packed.payload))
                    await outlet.push(pattern)
        finally:
            outlet.close()

"""How fast each transport moves blocks between two processes of this machine: what `pdserve doctor` tells.

A second process exports, this one pulls, and both use what workers use: the offer, the link's verification. It never
touches a running cluster.
"""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection

from contracts.config import Config
from contracts.errors import PdserveError
from contracts.handover import ExporterMessage, Introduce, PullerMessage
from contracts.kv import KvLayout
from contracts.seams import load_plug
from contracts.session import RouterMessage, Source, WorkerMessage
from engine.pool_memory import PoolMemory
from kv_transfer.choice import open_transports
from kv_transfer.handshake import Handshake
from kv_transfer.offer import Offer
from kv_transfer.peer import Peer, Puller
from protos.links.base import Duplex

_LAYOUT = KvLayout("doctor", "doctor", "doctor", "float32", 32, 16, 64, 16, "doctor")  # 4 MiB a block
_INCARNATION = 1
_START_SECONDS = 30.0


async def measure_links(config: Config) -> dict[str, float | str]:
    """By transport, in the order of choice: bytes a second, or why it does not work."""
    found: dict[str, float | str] = {}
    async with _exporter(config) as address:
        pool = PoolMemory(_LAYOUT, 1)
        link = load_plug("link", "grpc").create()
        transports = open_transports(config, pool)
        try:
            for name, transport in transports.items():
                rates: dict[str, float | None] = {}
                puller = Puller(
                    link=link,
                    store=pool,
                    transports={name: transport},
                    config=config.transfer,
                    worker_id="doctor",
                    secret="",
                    measured=rates.__setitem__,
                )
                peer = Peer(Source("doctor", address, _INCARNATION), puller)
                try:
                    await peer.verify()
                    found[name] = rates[name] or 0.0
                except PdserveError as error:
                    found[name] = error.message
                finally:
                    await peer.close()
        finally:
            for transport in transports.values():
                await transport.close()
            await link.close()
            pool.close()
    return found


class _Handler:
    """Sets up links and nothing else."""

    def __init__(self, offer: Offer, silence_seconds: float) -> None:
        self._offer = offer
        self._silence_seconds = silence_seconds

    async def session(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        """There is no router."""

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        """Only the set-up of a link is answered."""
        first = await stream.receive()
        if isinstance(first, Introduce):
            await self._offer.set_up(stream, first, self._silence_seconds)

    async def scrape(self) -> str:
        """It counts nothing."""
        return ""


@asynccontextmanager
async def _exporter(config: Config) -> AsyncIterator[str]:
    """The address of a second process. It ends with the pipe, so it cannot outlive this one."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(config, there), daemon=True)
    process.start()
    there.close()
    try:
        if not await asyncio.to_thread(here.poll, _START_SECONDS):
            raise PdserveError(f"a second process did not start in {_START_SECONDS:g} s")
        yield here.recv()
    finally:
        here.close()
        await asyncio.to_thread(process.join)


def _serve(config: Config, pipe: Connection) -> None:
    asyncio.run(_export(config, pipe))


async def _export(config: Config, pipe: Connection) -> None:
    pool = PoolMemory(_LAYOUT, 1)
    offer = Offer(Handshake(_INCARNATION, _LAYOUT), pool, open_transports(config, pool))
    link = load_plug("link", "grpc").create()
    try:
        await offer.open(config.cluster.host)
        pipe.send(await link.serve(f"{config.cluster.host}:0", _Handler(offer, config.transfer.silence_seconds)))
        await asyncio.to_thread(pipe.poll, None)  # until the other end is closed
    finally:
        await link.close()
        await offer.close()
        pool.close()

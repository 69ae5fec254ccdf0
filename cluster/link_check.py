"""How fast each transport moves blocks between two processes of this machine: what `pdserve doctor` tells.

A second process exports, this one pulls, and both use what workers use: the offer, the link's verification. It never
touches a running cluster, takes no longer than a person waits, and leaves nothing.
"""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from cluster.addresses import bracketed
from contracts.config import Config
from contracts.errors import ErrorInfo, PdserveError, StartupError
from contracts.handover import ExporterMessage, Introduce, PullerMessage
from contracts.kv import KvLayout
from contracts.seams import load_plug
from contracts.session import RouterMessage, Source, WorkerMessage
from engine.pool_memory import PoolMemory
from kv_transfer.channels.sockets import readable
from kv_transfer.choice import open_transports
from kv_transfer.handshake import Handshake
from kv_transfer.offer import Offer
from kv_transfer.peer import Peer, Puller
from protos.links.base import Duplex, Link

_LAYOUT = KvLayout("doctor", "doctor", "doctor", "float32", 32, 16, 64, 16, "doctor")  # 4 MiB a block
_INCARNATION = 1
_MOST_SECONDS = 12.0
_END_SECONDS = 2.0
"""What the second process may take to end by itself."""


async def measure_links(config: Config) -> dict[str, float | str]:
    """By transport, in the order of choice: bytes a second, or why it does not work. Bounded in time. Raises
    PdserveError when there is nothing to measure them with."""
    pool = PoolMemory(_LAYOUT, 1)
    try:
        transports = open_transports(config, pool)
        link = load_plug("link", "grpc").create()
        found: dict[str, float | str] = dict.fromkeys(transports, f"it took longer than {_MOST_SECONDS:g} s")

        def measured(name: str, rate: float | None) -> None:
            found[name] = rate or 0.0

        try:
            puller = Puller(link, pool, transports, config.transfer, "doctor", secret="", measured=measured)
            found |= await _problems(config, puller)
        finally:
            for transport in transports.values():
                await transport.close()
            await link.close()
    finally:
        pool.close()
    return found


async def _problems(config: Config, puller: Puller) -> dict[str, str]:
    """Verify a link of each transport; by transport, why one does not work."""
    problems: dict[str, str] = {}
    started = False
    try:
        async with asyncio.timeout(_MOST_SECONDS), _exporter(config) as address:
            started = True
            for name, transport in puller.transports.items():
                peer = Peer(Source("doctor", address, _INCARNATION), replace(puller, transports={name: transport}))
                try:
                    await peer.verify()
                except PdserveError as error:
                    problems[name] = error.message
                finally:
                    await peer.close()
    except TimeoutError as error:
        if not started:
            raise StartupError(f"a second process did not start in {_MOST_SECONDS:g} s") from error
    return problems


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
    """The address of a second process. It ends with the pipe, so it cannot outlive this one. Raises PdserveError when
    it cannot serve."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(config, there), daemon=True)
    try:
        with here:
            with there:
                process.start()
            await readable(here.fileno())
            yield _address(here)
    finally:
        await _end(process)


def _address(pipe: Connection) -> str:
    """What the second process says first. Raises PdserveError."""
    try:
        said = pipe.recv()
    except EOFError as error:
        raise StartupError("a second process died while it started") from error
    if isinstance(said, ErrorInfo):
        raise said.to_error()
    return str(said)


async def _end(process: SpawnProcess) -> None:
    """It has been told, by the end of its pipe."""
    try:
        async with asyncio.timeout(_END_SECONDS):
            await readable(process.sentinel)
    except TimeoutError:
        process.kill()
    process.join()
    process.close()


def _serve(config: Config, pipe: Connection) -> None:
    asyncio.run(_export(config, pipe))


async def _export(config: Config, pipe: Connection) -> None:
    pool = PoolMemory(_LAYOUT, 1)
    offer = Offer(Handshake(_INCARNATION, _LAYOUT), pool, open_transports(config, pool))
    link = load_plug("link", "grpc").create()
    try:
        pipe.send(await _open(offer, link, config))
        await readable(pipe.fileno())  # until the other end is closed
    finally:
        await link.close()
        await offer.close()
        pool.close()


async def _open(offer: Offer, link: Link, config: Config) -> str | ErrorInfo:
    host = config.cluster.host
    try:
        await offer.open(host)
        return await link.serve(f"{bracketed(host)}:0", _Handler(offer, config.transfer.silence_seconds))
    except PdserveError as error:
        return error.info()

"""The process that exports a prompt's KV, and the baselines' sending ends, for benchmarks/handover.py.

It runs what a worker runs: pool, exports, exporter, offer, grpc link; only the engine is missing.
"""

import asyncio
import multiprocessing
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import uvloop

from benchmarks import bare_grpc
from cluster.freed_memory import keep_freed_memory
from contracts.config import TransferConfig
from contracts.errors import PdserveError
from contracts.handover import ExporterMessage, PullerMessage
from contracts.kv import BlockHash, KvLayout
from contracts.requests import AttemptKey, Token
from contracts.seams import load_plug
from contracts.session import RouterMessage, WorkerMessage
from engine.kv_pool import KvPool
from kv_transfer.exporter import Exporter
from kv_transfer.exports import Exports
from kv_transfer.frames import blocks_per_frame
from kv_transfer.handshake import Handshake
from kv_transfer.offer import Offer
from protos.links.base import Duplex
from telemetry.tracing import NoTracing

HOST = "127.0.0.1"
BLOCK_TOKENS = 16
ROW_BYTES = 2 * BLOCK_TOKENS * 4  # what an element of head_dim takes in a float32 block of one layer and one head
TICKET = b"t" * 16
INCARNATION = 1
LONG = 3600.0  # seconds: no lease and no deadline ends while this measures


@dataclass(frozen=True, slots=True)
class Spec:
    """What both processes know. `handovers`: how many of each transport there will be. `keep_freed`: whether the
    processes keep the memory that they free, as workers do."""

    blocks: int
    block_bytes: int
    frame_bytes: int
    transports: tuple[str, ...]
    handovers: int
    keep_freed: bool

    @property
    def total(self) -> int:
        """Bytes of the prompt."""
        return self.blocks * self.block_bytes

    @property
    def frame(self) -> int:
        """Bytes of a frame: whole blocks."""
        return blocks_per_frame(self.frame_bytes, self.block_bytes) * self.block_bytes

    @property
    def layout(self) -> KvLayout:
        """Of a model whose blocks have this size."""
        size = self.block_bytes // ROW_BYTES
        return KvLayout("bench", "bench", "bench", "float32", 1, 1, size, BLOCK_TOKENS, "bench")

    @property
    def config(self) -> TransferConfig:
        """Everything as in a worker, but see LONG."""
        return TransferConfig(frame_bytes=self.frame_bytes, lease_seconds=LONG)

    def key(self, transport: str, number: int) -> AttemptKey:
        """The attempt of one hand-over."""
        return AttemptKey(f"{transport}-{number}", 1)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the exporting process answers: its link, and the ports of the baselines."""

    link: str
    plain: int
    bare: bare_grpc.Ports


class Pins:
    """Nothing else wants these blocks."""

    def pin(self, key: AttemptKey, blocks: Sequence[int]) -> None:
        """They stay anyway."""

    def lend(self, key: AttemptKey, hashes: Sequence[BlockHash]) -> Sequence[int]:
        """Nobody fetches."""
        return ()

    def unpin(self, key: AttemptKey, error: PdserveError | None) -> None:
        """They stay anyway."""


class PullHandler:
    """A process that answers pulls only."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    async def session(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        """There is no router."""

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        """As a worker does."""
        await self._exporter.serve(stream)

    async def scrape(self) -> str:
        """It counts nothing."""
        return ""


def run_exporter(spec: Spec, pipe: Connection) -> None:
    """The exporting process: tells its addresses, ends when the pipe does."""
    if spec.keep_freed:
        keep_freed_memory()
    uvloop.run(export(spec, pipe))  # as cluster/actors.py runs nodes


async def export(spec: Spec, pipe: Connection) -> None:
    """Everything that the pulling process asks for."""
    data = np.random.default_rng(1).integers(0, 256, spec.total, np.uint8).data
    async with AsyncExitStack() as stack:
        pool = KvPool(spec.layout, spec.blocks)
        stack.callback(pool.close)
        for block in range(spec.blocks):
            pool.writable(block)[:] = data[block * spec.block_bytes : (block + 1) * spec.block_bytes]
        handshake = Handshake(INCARNATION, spec.layout)
        transports = {name: load_plug("transport", name).create(pool, spec.config) for name in spec.transports}
        offer = Offer(handshake, pool, transports)
        stack.push_async_callback(offer.close)
        await offer.open(HOST)
        exporter = Exporter(computed(spec), handshake, pool, offer, config=spec.config, tracing=NoTracing())
        link = load_plug("link", "grpc").create()
        stack.push_async_callback(link.close)
        address = await link.serve(f"{HOST}:0", PullHandler(exporter))
        ports = await stack.enter_async_context(bare_grpc.serve(data))
        listener = stack.enter_context(socket.create_server((HOST, 0)))
        sending = asyncio.create_task(send_plain(listener, data))
        stack.callback(sending.cancel)
        pipe.send(Addresses(address, listener.getsockname()[1], ports))
        await asyncio.to_thread(pipe.poll, None)  # until the other end is closed


def computed(spec: Spec) -> Exports:
    """An export of the same blocks for each hand-over that there will be."""
    loop = asyncio.get_running_loop()
    exports = Exports(Pins(), loop, block_size=BLOCK_TOKENS, config=spec.config)
    for key in (spec.key(name, number) for name in spec.transports for number in range(spec.handovers)):
        exports.open(key, TICKET, loop.time() + LONG)
        exports.attach(key, range(spec.blocks))
        exports.finish(key, Token(1, 42, "x", None, None), spec.blocks * BLOCK_TOKENS)
    return exports


async def send_plain(listener: socket.socket, data: memoryview) -> None:
    """All bytes to the one who connects, each time it asks."""
    listener.setblocking(False)
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    connection.setblocking(True)

    def answer() -> None:
        with connection:
            while connection.recv(1):
                connection.sendall(data)

    await asyncio.to_thread(answer)


@asynccontextmanager
async def exporting(spec: Spec) -> AsyncIterator[Addresses]:
    """The other process. It ends with the pipe, so it cannot outlive this one."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_exporter, args=(spec, there), daemon=True)
    process.start()
    there.close()
    try:
        yield await asyncio.to_thread(here.recv)
    finally:
        here.close()
        await asyncio.to_thread(process.join)

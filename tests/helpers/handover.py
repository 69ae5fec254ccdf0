"""The two ends of a hand-over over a memory link, without an engine: for tests in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import wraps
from itertools import takewhile
from typing import Any, ParamSpec

from contracts.config import TransferConfig
from contracts.errors import PdserveError
from contracts.handover import ExporterMessage, Fetch, Last, Pull, PullerMessage
from contracts.kv import SPARE_BLOCKS, BlockHash, BlockStore, KvLayout
from contracts.requests import AttemptKey, FinishReason, Token
from contracts.session import RouterMessage, Source, WorkerMessage
from kv_transfer.exporter import Exporter
from kv_transfer.exports import Exports
from kv_transfer.handshake import Handshake
from kv_transfer.offer import Offer
from kv_transfer.orders import ReceiveOrder, TransferStats
from kv_transfer.peer import OpenInlet, Puller
from kv_transfer.receiver import Receiver
from kv_transfer.transports.base import Transport
from protos.links import memory
from protos.links.base import Duplex
from protos.memory_network import MemoryNetwork
from simulator.virtual_time import run
from telemetry.tracing import NoTracing
from tests.helpers.bent_transport import plain

P = ParamSpec("P")

BLOCK_SIZE = 4
INCARNATION = 77
TICKET = b"t" * 16
SECRET = "s3cret"
KEY = AttemptKey("1-1", 1)
LAYOUT = KvLayout("model", "tokenizer", "numerics", "uint64", 2, 1, 1, BLOCK_SIZE, "rope")
CONFIG = TransferConfig(transport="memory", frame_bytes=2 * LAYOUT.block_bytes)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that runs on a loop in virtual time."""

    @wraps(test)
    def sync(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return sync


def token(finish: FinishReason | None = None) -> Token:
    return Token(1, 42, "x", None, finish)


def pull(key: AttemptKey = KEY, *, ticket: bytes = TICKET, first_block: int = 0, **changes: Any) -> Pull:
    fields: dict[str, Any] = {
        "incarnation": INCARNATION,
        "puller": "d",
        "secret": SECRET,
        "layout": LAYOUT,
        "transport": "memory",
    }
    return Pull(key=key, ticket=ticket, first_block=first_block, **(fields | changes))


def fetch(key: AttemptKey, hashes: Sequence[BlockHash], **changes: Any) -> Fetch:
    fields: dict[str, Any] = {
        "deadline_ms": 600_000,
        "incarnation": INCARNATION,
        "puller": "d",
        "secret": SECRET,
        "layout": LAYOUT,
        "transport": "memory",
    }
    return Fetch(key=key, hashes=tuple(hashes), **(fields | changes))


class ByteStore:
    """Blocks of bytes; remembers every write."""

    descriptor = None

    def __init__(self, blocks: int = 64, fill: int = 0, layout: KvLayout = LAYOUT) -> None:
        self.layout = layout
        self.blocks = blocks
        self.data = [bytearray([fill]) * layout.block_bytes for _ in range(blocks + SPARE_BLOCKS)]
        self.writes: list[int] = []

    def read(self, block: int) -> memoryview:
        return memoryview(self.data[block]).toreadonly()

    def writable(self, block: int) -> memoryview:
        self.writes.append(block)
        return memoryview(self.data[block])


class Book:
    """Pins that refuse to be set or unset twice. `cached`: blocks by their content hash, to lend."""

    def __init__(self) -> None:
        self.cached: dict[BlockHash, int] = {}
        self.pinned: dict[AttemptKey, tuple[int, ...]] = {}
        self.unpinned: list[AttemptKey] = []

    def pin(self, key: AttemptKey, blocks: Sequence[int]) -> None:
        assert key not in self.pinned
        assert key not in self.unpinned
        self.pinned[key] = tuple(blocks)

    def lend(self, key: AttemptKey, hashes: Sequence[BlockHash]) -> Sequence[int]:
        known = takewhile(self.cached.__contains__, hashes)
        blocks = [self.cached[block_hash] for block_hash in known]
        if blocks:
            self.pin(key, blocks)
        return blocks

    def unpin(self, key: AttemptKey, error: PdserveError | None) -> None:
        del self.pinned[key]
        self.unpinned.append(key)


class PullHandler:
    """A process that answers pulls only."""

    def __init__(self, serve: Callable[[Duplex[ExporterMessage, PullerMessage]], Awaitable[None]]) -> None:
        self._serve = serve

    async def session(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        raise NotImplementedError

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        await self._serve(stream)

    async def scrape(self) -> str:
        raise NotImplementedError


class Prefill:
    """The exporting side. Blocks of the prompt are 10, 11, ... and hold their number + 1. `transport` makes it over
    the store."""

    def __init__(self, config: TransferConfig = CONFIG, transport: Callable[[BlockStore], Transport] = plain) -> None:
        self.book = Book()
        self.store = ByteStore()
        for block, data in enumerate(self.store.data):
            data[:] = bytes([block + 1]) * len(data)
        self.exports = Exports(self.book, asyncio.get_running_loop(), block_size=BLOCK_SIZE, config=config)
        self.handshake = Handshake(INCARNATION, LAYOUT, SECRET)
        self.offer = Offer(self.handshake, self.store, {"memory": transport(self.store)})
        self.exporter = Exporter(
            self.exports, self.handshake, self.store, self.offer, config=config, tracing=NoTracing()
        )

    def open(self, deadline: float = 600.0) -> bool:
        return self.exports.open(KEY, TICKET, deadline)

    def attach(self, blocks: int = 5) -> None:
        self.exports.attach(KEY, range(10, 10 + blocks))

    def finish(self, tokens: int = 18, finish: FinishReason | None = None) -> None:
        self.exports.finish(KEY, token(finish), tokens)

    def compute_all(self) -> None:
        """A prompt of 18 tokens in 5 blocks, from Submit to its first token."""
        self.open()
        self.attach()
        self.finish()


class Rig:
    """A decode worker's receiver and whatever answers its pulls at "p". Blocks of the prompt are 30, 31, ..."""

    def __init__(self, config: TransferConfig = CONFIG) -> None:
        self.network = MemoryNetwork()
        self.config = config
        self.store = ByteStore()
        self.transport: Transport = plain(self.store)
        self.committed: list[Last] = []
        self.commit: Callable[[Last], None] = self.committed.append

    async def serve(self, answer: Callable[[Duplex[ExporterMessage, PullerMessage]], Awaitable[None]]) -> None:
        await memory.create(self.network).serve("p", PullHandler(answer))

    async def receive(self, **changes: Any) -> TransferStats:
        fields: dict[str, Any] = {
            "key": KEY,
            "ticket": TICKET,
            "source": Source("prefill-0", "p", INCARNATION),
            "blocks": range(30, 35),
            "first_block": 0,
            "kv_tokens": 18,
            "traceparent": "",
            "deadline": 600.0,
        }
        return await Receiver(self.puller(), self._inlet).receive(ReceiveOrder(**(fields | changes)), self.commit)

    def puller(self) -> Puller:
        return Puller(
            link=memory.create(self.network),
            store=self.store,
            transports={"memory": self.transport},
            config=self.config,
            worker_id="d",
            secret=SECRET,
            measured=lambda transport, rate: None,
        )

    async def _inlet(self, source: Source) -> OpenInlet:
        inlet = await (await self.transport.connect("")).inlet()
        return OpenInlet("memory", inlet, 0.0, lambda: None)

    def received(self) -> list[int]:
        """The first byte of each block of the prompt."""
        return [self.store.data[block][0] for block in range(30, 35)]


async def settle(turns: int = 20) -> None:
    """Let everything that is ready take its turns, without time passing."""
    for _ in range(turns):
        await asyncio.sleep(0)

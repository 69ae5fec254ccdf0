"""Fetches the KV of one prompt into blocks that a decode worker has reserved.

The decode worker calls `Receiver.receive` in a task for each hand-over. The receiver is the only writer of
those blocks, and when `receive` ends, however it does, it writes no more: only then may the caller let them
go. It must never commit on anything but a Last whose digest matches what lies in its own blocks.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from contracts.config import TransferConfig
from contracts.errors import Corrupt, DeadlineExceeded, PeerSilent, WorkerLost
from contracts.handover import (
    Abandon,
    Ack,
    Alive,
    Chunk,
    Ended,
    ExporterMessage,
    Last,
    Progress,
    Pull,
    PullerMessage,
    PullFailed,
)
from contracts.kv import BlockStore
from contracts.requests import AttemptKey
from contracts.session import Source
from kv_transfer.frames import checksum, digest
from kv_transfer.transports.base import Transport
from protos.links.base import Duplex, Link, LinkClosed
from protos.patience import receive_within

_GOODBYE_SECONDS = 1.0
"""Bound of the last message: the other side's lease says the same, only later."""

_Stream = Duplex[PullerMessage, ExporterMessage]


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """What to fetch. `blocks`: all blocks of the prompt, in order; the first `first_block` of them hold their
    content already. `kv_tokens`: tokens that they hold in the end. `deadline`: in the event loop's time."""

    key: AttemptKey
    ticket: bytes
    source: Source
    blocks: Sequence[int]
    first_block: int
    kv_tokens: int
    traceparent: str
    deadline: float


@dataclass(frozen=True, slots=True)
class TransferStats:
    """A finished hand-over: payload bytes and blocks; seconds in all, of those waited for messages, and from
    the start to the first block's arrival (None: no block was needed). `end` says how it ended."""

    end: Last | Ended
    bytes: int
    blocks: int
    seconds: float
    waited: float
    first_byte: float | None


@dataclass(slots=True)
class _Arrival:
    """What has come so far."""

    order: ReceiveOrder
    started: float
    checksums: list[int] = field(default_factory=list)
    bytes: int = 0
    waited: float = 0.0
    first_byte: float | None = None

    @property
    def next_block(self) -> int:
        return self.order.first_block + len(self.checksums)


class Receiver:
    """The receiving side of every hand-over of one worker."""

    def __init__(
        self,
        link: Link,
        store: BlockStore,
        transport: Transport,
        config: TransferConfig,
        *,
        worker_id: str,
        secret: str,
    ) -> None:
        self._link = link
        self._store = store
        self._transport = transport
        self._config = config
        self._worker_id = worker_id
        self._secret = secret

    async def receive(self, order: ReceiveOrder, commit: Callable[[Last], None]) -> TransferStats:
        """Fetch, verify, `commit` (called at most once, with all blocks verified), acknowledge.

        Raises HandoverFailed and its kinds, WorkerLost when the link breaks, DeadlineExceeded, or the error
        that ended the prefill. Cancelling it is safe at every await.
        """
        loop = asyncio.get_running_loop()
        arrival = _Arrival(order, loop.time())
        try:
            async with asyncio.timeout_at(order.deadline):
                stream = await self._open(order)
        except TimeoutError as error:
            raise _too_late() from error
        try:
            async with asyncio.timeout_at(order.deadline), self._alive(stream):
                await stream.send(self._pull(order))
                end = await self._fetch(stream, arrival)
            if isinstance(end, Last):
                commit(end)
        except TimeoutError as error:
            await self._goodbye(stream, Abandon("deadline"))
            raise _too_late() from error
        except LinkClosed as closed:
            raise _lost(order, closed) from closed
        except BaseException as error:
            await self._goodbye(stream, Abandon(type(error).__name__))
            raise
        else:
            if isinstance(end, Last):
                await self._goodbye(stream, Ack())
        finally:
            await stream.close()
        seconds = loop.time() - arrival.started
        return TransferStats(end, arrival.bytes, len(arrival.checksums), seconds, arrival.waited, arrival.first_byte)

    async def _goodbye(self, stream: _Stream, message: Ack | Abandon) -> None:
        with suppress(LinkClosed, TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await stream.send(message)

    async def _open(self, order: ReceiveOrder) -> _Stream:
        try:
            async with asyncio.timeout(self._config.silence_seconds):
                return await self._link.open_pull(order.source.address)
        except TimeoutError as error:
            raise PeerSilent(f"worker {order.source.worker_id} does not answer") from error
        except LinkClosed as closed:
            raise _lost(order, closed) from closed

    def _pull(self, order: ReceiveOrder) -> Pull:
        return Pull(
            key=order.key,
            ticket=order.ticket,
            incarnation=order.source.incarnation,
            puller=self._worker_id,
            secret=self._secret,
            layout=self._store.layout,
            transport=self._config.transport,
            first_block=order.first_block,
            traceparent=order.traceparent,
        )

    @asynccontextmanager
    async def _alive(self, stream: _Stream) -> AsyncIterator[None]:
        """Renews the lease each third of it while the body runs; has ended when the body has."""
        renewing = asyncio.create_task(self._renew(stream))
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})
            if not renewing.cancelled():
                renewing.result()  # an error of ours must show

    async def _renew(self, stream: _Stream) -> None:
        with suppress(LinkClosed):  # the receiving side sees it as well, and says so
            while True:
                await asyncio.sleep(self._config.lease_seconds / 3)
                await stream.send(Alive())

    async def _fetch(self, stream: _Stream, arrival: _Arrival) -> Last | Ended:
        while True:
            message = await self._next(stream, arrival)
            match message:
                case Chunk():
                    await self._accept(message, arrival)
                case Last():
                    _verify(message, arrival)
                    return message
                case Ended():
                    return message
                case PullFailed():
                    raise message.error.to_error()
                case Progress():
                    pass  # that it came is all it says to us

    async def _next(self, stream: _Stream, arrival: _Arrival) -> ExporterMessage:
        loop = asyncio.get_running_loop()
        since, worker = loop.time(), arrival.order.source.worker_id
        try:
            message = await receive_within(stream, self._config.silence_seconds)
        except TimeoutError as error:
            raise PeerSilent(f"worker {worker} said nothing for {self._config.silence_seconds:g} s") from error
        arrival.waited += loop.time() - since
        if message is None:
            raise WorkerLost(f"worker {worker} ended the hand-over before its last block")
        return message

    async def _accept(self, chunk: Chunk, arrival: _Arrival) -> None:
        """Write the blocks, then verify what was written. Raises Corrupt."""
        if arrival.first_byte is None:
            arrival.first_byte = asyncio.get_running_loop().time() - arrival.started
        first, end = arrival.next_block, arrival.next_block + chunk.count
        if chunk.first_block != first or not first < end <= len(arrival.order.blocks):
            raise Corrupt(
                f"block {first} of {len(arrival.order.blocks)} follows, {chunk.count} from {chunk.first_block} came"
            )
        if len(chunk.checksums) != chunk.count:
            raise Corrupt(f"{chunk.count} blocks came with {len(chunk.checksums)} checksums")
        mine = arrival.order.blocks[first:end]
        await self._transport.unpack(chunk.payload, self._store, mine)
        for index, (block, expected) in enumerate(zip(mine, chunk.checksums, strict=True)):
            if checksum(self._store.read(block)) != expected:
                raise Corrupt(f"the checksum of block {first + index} of the prompt differs")
        arrival.checksums += chunk.checksums
        arrival.bytes += chunk.count * self._store.layout.block_bytes


def _verify(last: Last, arrival: _Arrival) -> None:
    """Raises Corrupt unless exactly what was ordered has come."""
    order = arrival.order
    for what, expected, came in (
        ("tokens", order.kv_tokens, last.kv_tokens),
        ("blocks", len(order.blocks), last.blocks),
        ("blocks received", len(order.blocks), arrival.next_block),
        ("digest", digest(arrival.checksums), last.digest),
    ):
        if came != expected:
            raise Corrupt(f"{what}: {expected} expected, {came} came")


def _lost(order: ReceiveOrder, closed: LinkClosed) -> WorkerLost:
    return WorkerLost(f"worker {order.source.worker_id} is gone: {closed}")


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the request's deadline passed during the hand-over")

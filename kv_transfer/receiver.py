"""Fetches the KV of one prompt into blocks that a decode worker has reserved.

The decode worker calls `Receiver.receive` in a task for each hand-over. The receiver is the only writer of
those blocks, and when `receive` ends, however it does, it writes no more: only then may the caller let them
go. It must never commit on anything but a Last whose digest matches what lies in its own blocks.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from contracts.errors import Corrupt, DeadlineExceeded, HandoverFailed, PeerSilent, WorkerLost
from contracts.handover import (
    Abandon,
    Ack,
    Alive,
    Chunk,
    Ended,
    ExporterMessage,
    Fetch,
    Introduced,
    Last,
    Progress,
    Pull,
    PullFailed,
)
from contracts.session import Source
from kv_transfer.frames import blocks_per_frame, digest
from kv_transfer.orders import FetchOrder, Order, ReceiveOrder, TransferStats
from kv_transfer.peer import OpenInlet, Puller, PullerStream, accept_within, open_stream
from kv_transfer.transports.base import Inlet
from protos.links.base import LinkClosed
from protos.patience import receive_within

_GOODBYE_SECONDS = 1.0
"""Bound of the last message: the other side's lease says the same, only later."""


@dataclass(slots=True)
class _Arrival:
    """What has come so far."""

    order: Order
    started: float
    patience: float  # seconds of silence after which the exporter is given up
    checksums: list[int] = field(default_factory=list)
    bytes: int = 0
    waited: float = 0.0
    first_byte: float | None = None

    @property
    def next_block(self) -> int:
        return self.order.first_block + len(self.checksums)


class Receiver:
    """The receiving side of every hand-over of one worker. `inlets`: see Peers.inlet."""

    def __init__(self, puller: Puller, inlets: Callable[[Source], Awaitable[OpenInlet]]) -> None:
        self._puller = puller
        self._config = puller.config
        self._store = puller.store
        self._inlets = inlets
        self._per_frame = blocks_per_frame(self._config.frame_bytes, self._store.layout.block_bytes)
        self._parting: set[asyncio.Task[None]] = set()

    async def receive(self, order: Order, commit: Callable[[Last], None]) -> TransferStats:
        """Fetch, verify, `commit` (called at most once, with all blocks verified), acknowledge. After a FetchOrder
        Last says how many blocks came. When it ends nothing is written any more; it does not wait until a peer, that
        may not hear it, was told so.

        Raises HandoverFailed and its kinds, WorkerLost when the link breaks, DeadlineExceeded, or the error
        that ended the prefill. Cancelling it is safe at every await.
        """
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(order.deadline):
                opened = await self._inlets(order.source)
        except TimeoutError as error:
            raise _too_late() from error
        arrival = _Arrival(order, started, self._patience(order, opened))
        complete = False
        try:
            end = await self._pull_over(opened, arrival, commit)
            complete = True
        finally:
            opened.close(reuse=complete)
        seconds = asyncio.get_running_loop().time() - started
        return TransferStats(
            end=end,
            transport=opened.transport,
            bytes=arrival.bytes,
            blocks=len(arrival.checksums),
            seconds=seconds,
            waited=arrival.waited,
            first_byte=arrival.first_byte,
        )

    async def close(self) -> None:
        """End what is still being said to peers. Idempotent."""
        for task in self._parting:
            task.cancel()
        if self._parting:
            await asyncio.wait(self._parting)

    async def _pull_over(self, opened: OpenInlet, arrival: _Arrival, commit: Callable[[Last], None]) -> Last | Ended:
        order = arrival.order
        try:
            async with asyncio.timeout_at(order.deadline):
                stream = await open_stream(self._puller, order.source)
        except TimeoutError as error:
            raise _too_late() from error
        goodbye: Ack | Abandon | None = None
        try:
            async with asyncio.timeout_at(order.deadline), self._alive(stream):
                await stream.send(self._pull(order, opened))
                end = await self._fetch(stream, opened.inlet, arrival)
            if isinstance(end, Last):
                commit(end)
                goodbye = Ack()
        except TimeoutError as error:
            goodbye = Abandon("deadline")
            raise _too_late() from error
        except LinkClosed as closed:
            raise _lost(order, closed) from closed
        except BaseException as error:
            goodbye = Abandon(type(error).__name__)
            raise
        else:
            return end
        finally:
            self._part(stream, goodbye)

    def _patience(self, order: Order, opened: OpenInlet) -> float:
        """A frame on its way shows nothing of itself before it is whole. Twice the time that it should take, as
        hand-overs share a line."""
        frame = min(len(order.blocks), self._per_frame)
        return self._config.silence_seconds + 2 * frame * opened.block_seconds

    def _part(self, stream: PullerStream, goodbye: Ack | Abandon | None) -> None:
        task = asyncio.create_task(_say(stream, goodbye))
        self._parting.add(task)
        task.add_done_callback(self._parting.discard)

    def _pull(self, order: Order, opened: OpenInlet) -> Pull | Fetch:
        if isinstance(order, FetchOrder):
            return self._fetch_request(order, opened)
        return Pull(
            key=order.key,
            ticket=order.ticket,
            incarnation=order.source.incarnation,
            puller=self._puller.worker_id,
            secret=self._puller.secret,
            layout=self._store.layout,
            transport=opened.transport,
            first_block=order.first_block,
            traceparent=order.traceparent,
            channel=opened.inlet.channel,
        )

    def _fetch_request(self, order: FetchOrder, opened: OpenInlet) -> Fetch:
        left = order.deadline - asyncio.get_running_loop().time()
        return Fetch(
            key=order.key,
            hashes=tuple(order.hashes),
            deadline_ms=max(1, int(1000 * left)),
            incarnation=order.source.incarnation,
            puller=self._puller.worker_id,
            secret=self._puller.secret,
            layout=self._store.layout,
            transport=opened.transport,
            traceparent=order.traceparent,
            channel=opened.inlet.channel,
        )

    @asynccontextmanager
    async def _alive(self, stream: PullerStream) -> AsyncIterator[None]:
        """Renews the lease each third of it while the body runs; has ended when the body has."""
        renewing = asyncio.create_task(self._renew(stream))
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})
            if not renewing.cancelled():
                renewing.result()  # an error of ours must show

    async def _renew(self, stream: PullerStream) -> None:
        with suppress(LinkClosed):  # the receiving side sees it as well, and says so
            while True:
                await asyncio.sleep(self._config.lease_seconds / 3)
                await stream.send(Alive())

    async def _fetch(self, stream: PullerStream, inlet: Inlet, arrival: _Arrival) -> Last | Ended:
        while True:
            message = await self._next(stream, arrival)
            match message:
                case Chunk():
                    try:
                        await self._accept(message, inlet, arrival)
                    except LinkClosed:
                        await self._last_words(stream)
                        raise
                case Last():
                    _verify(message, arrival)
                    return message
                case Ended():
                    return message
                case PullFailed():
                    raise message.error.to_error()
                case Progress():
                    pass  # that it came is all it says to us
                case Introduced():
                    raise HandoverFailed("a Pull was answered with Introduced")

    async def _last_words(self, stream: PullerStream) -> None:
        """An exporter whose prefill failed breaks the channel of a chunk that is on its way, and then says why.
        Raises what it says, if it does."""
        with suppress(LinkClosed, TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                while (message := await stream.receive()) is not None:
                    if isinstance(message, PullFailed):
                        raise message.error.to_error()

    async def _next(self, stream: PullerStream, arrival: _Arrival) -> ExporterMessage:
        loop = asyncio.get_running_loop()
        since, worker = loop.time(), arrival.order.source.worker_id
        try:
            message = await receive_within(stream, arrival.patience)
        except TimeoutError as error:
            raise PeerSilent(f"worker {worker} said nothing for {arrival.patience:g} s") from error
        arrival.waited += loop.time() - since
        if message is None:
            raise WorkerLost(f"worker {worker} ended the hand-over before its last block")
        return message

    async def _accept(self, chunk: Chunk, inlet: Inlet, arrival: _Arrival) -> None:
        """Write the blocks, then verify what was written. Raises Corrupt, PeerSilent, LinkClosed."""
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
        came = await accept_within(inlet, chunk, mine, arrival.patience)
        for index, (found, expected) in enumerate(zip(came, chunk.checksums, strict=True)):
            if found != expected:
                raise Corrupt(f"the checksum of block {first + index} of the prompt differs")
        arrival.checksums += chunk.checksums
        arrival.bytes += chunk.count * self._store.layout.block_bytes


def _verify(last: Last, arrival: _Arrival) -> None:
    """Raises Corrupt unless exactly what was ordered has come."""
    order = arrival.order
    blocks = len(order.blocks) if isinstance(order, ReceiveOrder) else arrival.next_block
    for what, expected, came in (
        ("tokens", order.kv_tokens if isinstance(order, ReceiveOrder) else last.kv_tokens, last.kv_tokens),
        ("blocks", blocks, last.blocks),
        ("blocks received", blocks, arrival.next_block),
        ("digest", digest(arrival.checksums), last.digest),
    ):
        if came != expected:
            raise Corrupt(f"{what}: {expected} expected, {came} came")


async def _say(stream: PullerStream, goodbye: Ack | Abandon | None) -> None:
    """The last message of a stream, if there is one, and its end."""
    try:
        with suppress(LinkClosed, TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                if goodbye is not None:
                    await stream.send(goodbye)
    finally:
        await stream.close()


def _lost(order: Order, closed: LinkClosed) -> WorkerLost:
    return WorkerLost(f"worker {order.source.worker_id} is gone: {closed}")


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed during the hand-over")

"""The hand-over over a real gRPC link: the bytes arrive, and both ends let go however it ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from contracts.config import TransferConfig
from contracts.errors import PdserveError, PullGone, Stale, WorkerLost
from contracts.handover import Last
from contracts.session import Source
from kv_transfer.exporter import Exporter
from kv_transfer.exports import Exports
from kv_transfer.handshake import Handshake
from kv_transfer.offer import Offer
from kv_transfer.orders import ReceiveOrder
from kv_transfer.peer import Puller
from kv_transfer.peers import Peers
from kv_transfer.receiver import Receiver
from kv_transfer.transports import grpc as grpc_transport
from protos.links import grpc
from protos.links.base import Link
from telemetry.tracing import NoTracing
from tests.helpers.handover import (
    BLOCK_SIZE,
    INCARNATION,
    KEY,
    LAYOUT,
    SECRET,
    TICKET,
    Book,
    ByteStore,
    PullHandler,
    token,
)

BLOCKS = 40
WIDE = replace(LAYOUT, head_dim=8192)  # 1 MiB a block
CONFIG = TransferConfig(transport="grpc", frame_bytes=3 * 1024 * 1024)


class SignallingBook(Book):
    """Tells when the pin is gone, so that a test can wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()

    def unpin(self, key: object, error: PdserveError | None) -> None:
        super().unpin(KEY, error)
        self.released.set()


class SignallingStore(ByteStore):
    """Tells when the first block has come."""

    def __init__(self) -> None:
        super().__init__(BLOCKS, layout=WIDE)
        self.written = asyncio.Event()

    def writable(self, block: int) -> memoryview:
        if block < self.blocks:
            self.written.set()
        return super().writable(block)


@dataclass
class Pair:
    """Both ends, with a prompt that is computed."""

    book: SignallingBook
    exports: Exports
    source: ByteStore
    target: SignallingStore
    receiver: Receiver
    order: ReceiveOrder
    prefill_link: Link


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    source, target, book = ByteStore(BLOCKS, layout=WIDE), SignallingStore(), SignallingBook()
    for block, data in enumerate(source.data):
        data[:] = bytes([block + 1]) * len(data)
    loop = asyncio.get_running_loop()
    exports = Exports(book, loop, block_size=BLOCK_SIZE, config=CONFIG)
    handshake = Handshake(INCARNATION, WIDE, SECRET)
    offer = Offer(handshake, source, {"grpc": grpc_transport.create(source, CONFIG)})
    exporter = Exporter(exports, handshake, source, offer, config=CONFIG, tracing=NoTracing())
    here, there = grpc.create(), grpc.create()
    try:
        await offer.open("")
        async with asyncio.TaskGroup() as tasks:
            address = await here.serve("127.0.0.1:0", PullHandler(exporter.serve))
            puller = Puller(
                link=there,
                store=target,
                transports={"grpc": grpc_transport.create(target, CONFIG)},
                config=CONFIG,
                worker_id="d",
                secret=SECRET,
                measured=lambda transport, rate: None,
            )
            peers = Peers(puller, tasks, lambda: None)
            receiver = Receiver(puller, peers.inlet)
            order = ReceiveOrder(
                key=KEY,
                ticket=TICKET,
                source=Source("p", address, INCARNATION),
                blocks=range(BLOCKS),
                first_block=0,
                kv_tokens=BLOCKS * BLOCK_SIZE,
                traceparent="",
                deadline=loop.time() + 60,
            )
            exports.open(KEY, TICKET, loop.time() + 60)
            exports.attach(KEY, range(BLOCKS - 1, -1, -1))
            yield Pair(book, exports, source, target, receiver, order, here)
            await peers.close()
    finally:
        await there.close()
        await here.close()
    assert exports.leases() == 0
    exports.check()


def finish(p: Pair) -> None:
    p.exports.finish(KEY, token(), BLOCKS * BLOCK_SIZE)


async def test_all_bytes_arrive_in_order() -> None:
    committed: list[Last] = []
    async with pair() as p:
        finish(p)
        stats = await p.receiver.receive(p.order, committed.append)
        assert stats.bytes == BLOCKS * WIDE.block_bytes
        assert committed == [stats.end]
        assert p.target.data[:BLOCKS] == p.source.data[BLOCKS - 1 :: -1]
        await p.book.released.wait()
        with pytest.raises(PullGone):
            await p.receiver.receive(p.order, committed.append)


async def test_a_cancel_in_the_middle_releases_the_other_side() -> None:
    committed: list[Last] = []
    async with pair() as p:
        p.exports.publish(KEY, 30 * BLOCK_SIZE)
        receiving = asyncio.create_task(p.receiver.receive(p.order, committed.append))
        await p.target.written.wait()
        receiving.cancel()
        await asyncio.wait({receiving})
        writes = len(p.target.writes)
        await p.book.released.wait()
        assert (receiving.cancelled(), committed, len(p.target.writes)) == (True, [], writes)


async def test_an_exporter_that_goes_away_is_a_lost_worker() -> None:
    async with pair() as p:
        p.exports.publish(KEY, 8 * BLOCK_SIZE)
        receiving = asyncio.create_task(p.receiver.receive(p.order, lambda last: None))
        await p.target.written.wait()
        await p.prefill_link.close()
        with pytest.raises(WorkerLost):
            await receiving
        await p.book.released.wait()


async def test_a_refusal_reaches_the_receiver() -> None:
    async with pair() as p:
        finish(p)
        stale = replace(p.order, source=replace(p.order.source, incarnation=1))
        with pytest.raises(Stale):
            await p.receiver.receive(stale, lambda last: None)
        await p.receiver.receive(p.order, lambda last: None)
        await p.book.released.wait()

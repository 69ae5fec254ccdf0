"""Links under load and under faults: probes at one time, slow lines, long hand-overs, cancels at any turn."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest

from contracts.handover import ExporterMessage, Introduce, Probe, PullerMessage
from contracts.kv import BlockStore
from contracts.session import Source
from contracts.workers import Role, WorkerInfo
from kv_transfer.channels.inline import InlineEnd, InlineTransport
from kv_transfer.frames import checksum
from kv_transfer.orders import ReceiveOrder
from kv_transfer.peer import Peer, Puller
from kv_transfer.peers import Peers
from kv_transfer.receiver import Receiver
from protos.links import memory
from protos.links.base import Duplex
from tests.helpers.bent_transport import bent, plain
from tests.helpers.handover import (
    CONFIG,
    INCARNATION,
    KEY,
    LAYOUT,
    SECRET,
    TICKET,
    Prefill,
    PullHandler,
    Rig,
    in_virtual_time,
    settle,
)

SOURCE = Source("prefill-0", "p", INCARNATION)
ORDER = ReceiveOrder(KEY, TICKET, SOURCE, range(30, 35), 0, 18, "", 600.0)


class Line(InlineEnd):
    """Takes so many seconds for a block, and counts its connections that are open."""

    def __init__(self, store: BlockStore, seconds: float) -> None:
        super().__init__(store)
        self._seconds = seconds

    async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
        size = self._store.layout.block_bytes
        for index, block in enumerate(blocks):
            self._store.writable(block)[:] = payload[index * size : (index + 1) * size]
            await asyncio.sleep(self._seconds)
        return tuple(checksum(self._store.read(block)) for block in blocks)


async def serve(rig: Rig, address: str = "p") -> Prefill:
    p = Prefill()
    await p.offer.open("")
    await memory.create(rig.network).serve(address, PullHandler(p.exporter.serve))
    return p


def puller(rig: Rig, seconds: float = 0.0) -> Puller:
    line = bent(lambda store: Line(store, seconds)) if seconds else plain
    return replace(rig.puller(), transports={"memory": line(rig.store)})


def is_linked(peers: Peers) -> bool:
    return peers.linked


@in_virtual_time
async def test_links_that_are_probed_at_one_time_share_the_spare_block() -> None:
    rig = Rig()
    await serve(rig, "p")
    await serve(rig, "q")
    mine = puller(rig, 0.1)
    peers = [Peer(SOURCE, mine), Peer(replace(SOURCE, address="q"), mine)]
    async with asyncio.TaskGroup() as tasks:
        for peer in peers:
            tasks.create_task(peer.verify())
    assert all(peer.verified for peer in peers)


@in_virtual_time
async def test_a_link_that_was_verified_is_fast_enough_for_a_hand_over() -> None:
    """A block arrives within the silence, a frame of two does not."""
    rig = Rig()
    p = await serve(rig)
    seconds = CONFIG.silence_seconds * 0.9
    assert CONFIG.frame_bytes == 2 * LAYOUT.block_bytes
    peer = Peer(SOURCE, puller(rig, seconds))
    opened = await peer.inlet()
    opened.close(reuse=True)
    p.compute_all()
    assert opened.block_seconds == pytest.approx(seconds)
    await Receiver(puller(rig, seconds), lambda _: peer.inlet()).receive(ORDER, rig.commit)
    assert len(rig.committed) == 1
    assert not peer.used


@in_virtual_time
async def test_what_one_block_of_a_probe_was_held_up_by_says_nothing_about_the_line() -> None:
    class Hiccup(InlineEnd):
        blocks = 0

        async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
            Hiccup.blocks += 1
            await asyncio.sleep(2.0 if Hiccup.blocks == 3 else 0.001)
            return await super().accept(payload, blocks)

    rig = Rig()
    await serve(rig)
    peer = Peer(SOURCE, replace(rig.puller(), transports={"memory": bent(Hiccup)(rig.store)}))
    assert (await peer.inlet()).block_seconds == pytest.approx(0.001)


@in_virtual_time
async def test_a_hand_over_keeps_its_link_however_long_it_takes() -> None:
    rig = Rig()
    p = await serve(rig)
    p.open()
    p.attach()
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        peers = Peers(puller(rig), tasks, lambda: None)
        loop.call_later(3 * CONFIG.lease_seconds, p.finish)
        await Receiver(puller(rig), peers.inlet).receive(ORDER, rig.commit)
        assert loop.time() == pytest.approx(3 * CONFIG.lease_seconds)
        assert is_linked(peers)
        rig.network.kill("p")
        await asyncio.sleep(CONFIG.lease_seconds + 1)
        assert not is_linked(peers)  # nobody uses it, the registry does not name it, and it does not answer
        assert len(asyncio.all_tasks()) == 1


class Faulty(InlineTransport):
    """Its first connections fail in a way that nobody foresaw."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__(InlineEnd(store))
        self.faults = 2

    async def connect(self, address: str):  # type: ignore[no-untyped-def]  # of a type that is not public
        if self.faults:
            self.faults -= 1
            raise RuntimeError("a fault of ours")
        return await super().connect(address)


@in_virtual_time
async def test_a_fault_of_one_link_ends_neither_the_worker_nor_the_link() -> None:
    rig = Rig()
    await serve(rig)
    faulty = replace(rig.puller(), transports={"memory": Faulty(rig.store)})

    async def watch() -> AsyncGenerator[list[WorkerInfo]]:
        yield [WorkerInfo("prefill-0", Role.PREFILL, "p", INCARNATION, 1)]
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        peers = Peers(faulty, tasks, lambda: None)
        following = tasks.create_task(peers.follow(watch()))
        await asyncio.sleep(2)
        assert peers.linked
        following.cancel()
        await peers.close()


@in_virtual_time
async def test_a_cancel_at_any_turn_leaves_neither_a_user_nor_a_task() -> None:
    finished = 0
    for turn in range(120):
        rig = Rig()
        p = await serve(rig)
        p.compute_all()
        peer = Peer(SOURCE, puller(rig))
        receiver = Receiver(puller(rig), lambda _, peer=peer: peer.inlet())  # type: ignore[misc]
        receiving = asyncio.create_task(receiver.receive(ORDER, rig.commit))
        await settle(turn)
        receiving.cancel()
        await asyncio.wait({receiving})
        assert not peer.used
        finished += not receiving.cancelled()
        await settle(60)
        assert p.exports.leases() == 0 or not p.book.unpinned, turn
        p.exports.cancel(KEY, "as the router does")
        await settle()
        assert (p.book.pinned, len(asyncio.all_tasks())) == ({}, 1), turn
        await peer.close()
    assert 0 < finished < 120  # the turns reach from the first to the last


async def stubborn(rig: Rig, message: PullerMessage) -> Duplex[PullerMessage, ExporterMessage]:
    """A puller that asks and never reads."""
    stream = await memory.create(rig.network).open_pull("p")
    await stream.send(Introduce("d", SECRET, INCARNATION, LAYOUT))
    for _ in range(4):
        await stream.send(message)
    return stream


@in_virtual_time
async def test_a_puller_that_does_not_take_its_probe_is_given_up() -> None:
    rig = Rig()
    await serve(rig)
    await stubborn(rig, Probe("memory"))
    await settle()
    assert len(asyncio.all_tasks()) == 2  # the exporter's, which waits for room
    await asyncio.sleep(CONFIG.silence_seconds + 0.1)
    assert len(asyncio.all_tasks()) == 1

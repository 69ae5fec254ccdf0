"""The set-up of a link: the first way that works is taken, proven with the spare blocks only."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import NoReturn

import pytest

from contracts.errors import HandoverFailed, Incompatible, PdserveError, PeerSilent, PullNotFound, Stale, WorkerLost
from contracts.handover import ExporterMessage, PullerMessage
from contracts.kv import BlockStore
from contracts.session import Source
from contracts.workers import Role, WorkerInfo
from kv_transfer.channels.inline import InlineEnd, InlineTransport
from kv_transfer.exporter import Exporter
from kv_transfer.offer import PROBE_CHUNKS, Offer
from kv_transfer.peer import Peer
from kv_transfer.peers import Peers
from kv_transfer.transports.base import Inlet, Outlet, Packed, Transport
from protos.links import memory
from protos.links.base import Duplex, LinkClosed
from telemetry.tracing import NoTracing
from tests.helpers.bent_transport import bent, plain
from tests.helpers.handover import CONFIG, INCARNATION, LAYOUT, ByteStore, Prefill, PullHandler, Rig, in_virtual_time

SOURCE = Source("prefill-0", "p", INCARNATION)


class Unreachable(InlineTransport):
    """As shared memory is from another machine."""

    async def connect(self, address: str) -> NoReturn:
        raise LinkClosed("connection refused")


def unreachable(store: BlockStore) -> Transport:
    return Unreachable(InlineEnd(store))


class Damaging(InlineEnd):
    """What arrives is not what was sent."""

    async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
        return tuple(found ^ 1 for found in await super().accept(payload, blocks))


class Breaking:
    """A connection that is good for so many inlets, and its transport."""

    def __init__(self, store: BlockStore) -> None:
        self.left = 0
        self.closed = 0
        self._plain = plain(store)

    async def connect(self, address: str) -> "Breaking":
        return self

    async def inlet(self) -> Inlet:
        if not self.left:
            raise LinkClosed("broken")
        self.left -= 1
        return await (await self._plain.connect("")).inlet()

    async def close(self) -> None:
        self.closed += 1

    async def serve(self, host: str) -> str:
        raise NotImplementedError

    def outlet(self, channel: bytes) -> Outlet:
        raise NotImplementedError


class Ends:
    """An exporter with transports of several names, and a puller with others."""

    def __init__(self, theirs: Sequence[str], mine: dict[str, Callable[[BlockStore], Transport]]) -> None:
        self.rig = Rig()
        self.prefill = Prefill()
        handshake = self.prefill.handshake
        transports = {name: plain(self.prefill.store) for name in theirs}
        self.offer = Offer(handshake, self.prefill.store, transports)
        self.exporter = Exporter(
            self.prefill.exports, handshake, self.prefill.store, self.offer, config=CONFIG, tracing=NoTracing()
        )
        self.measured: list[str] = []
        self.puller = replace(
            self.rig.puller(),
            transports={name: make(self.rig.store) for name, make in mine.items()},
            measured=lambda transport, rate: self.measured.append(transport),
        )

    async def serve(self) -> None:
        await self.offer.open("")
        await self.rig.serve(self.exporter.serve)

    def peer(self, source: Source = SOURCE) -> Peer:
        return Peer(source, self.puller)


@pytest.mark.parametrize(
    ("theirs", "mine", "taken"),
    [
        (["a", "b"], {"a": plain, "b": plain}, "a"),
        (["a", "b"], {"b": plain, "a": plain}, "b"),  # the puller's order counts
        (["b"], {"a": plain, "b": plain}, "b"),
        (["a", "b"], {"a": unreachable, "b": plain}, "b"),
        (["a", "b"], {"a": bent(Damaging), "b": plain}, "b"),
    ],
)
def test_the_first_way_that_works_is_taken(
    theirs: list[str], mine: dict[str, Callable[[BlockStore], Transport]], taken: str
) -> None:
    @in_virtual_time
    async def check() -> None:
        ends = Ends(theirs, mine)
        await ends.serve()
        peer = ends.peer()
        assert not peer.verified
        opened = await peer.inlet()
        assert (opened.transport, ends.measured, peer.verified) == (taken, [taken], True)
        store = ends.rig.store
        assert set(store.writes) == {store.blocks + 1}  # nothing but the spare block was written
        assert store.data[-1] == ends.prefill.store.data[-2]
        await peer.inlet()
        assert ends.measured == [taken]  # it is set up once

    check()


@in_virtual_time
async def test_nothing_works() -> None:
    ends = Ends(["a", "b"], {"a": unreachable, "b": bent(Damaging), "c": plain})
    await ends.serve()
    peer = ends.peer()
    with pytest.raises(HandoverFailed, match="a: connection refused; b: the probe block arrived damaged; c is not off"):
        await peer.verify()
    assert not peer.verified


@pytest.mark.parametrize(
    ("error", "source", "changes"),
    [
        (Stale("incarnation: 77 here, 76 asked for"), replace(SOURCE, incarnation=76), {}),
        (PullNotFound("no such attempt"), SOURCE, {"secret": "guess"}),
        (
            Incompatible("numerics: 'numerics' here, 'other' there"),
            SOURCE,
            {"store": ByteStore(layout=replace(LAYOUT, numerics="other"))},
        ),
        (WorkerLost("worker prefill-0 is gone: nobody answers at nowhere"), replace(SOURCE, address="nowhere"), {}),
    ],
)
def test_a_refusal_is_final_and_says_why(error: PdserveError, source: Source, changes: dict[str, object]) -> None:
    @in_virtual_time
    async def check() -> None:
        ends = Ends(["a", "b"], {"a": plain, "b": plain})
        await ends.serve()
        ends.puller = replace(ends.puller, **changes)  # type: ignore[arg-type]  # fields of Puller
        with pytest.raises(PdserveError) as raised:
            await ends.peer(source).verify()
        assert (type(raised.value), raised.value.message) == (type(error), error.message)
        assert asyncio.get_running_loop().time() == 0.0

    check()


@in_virtual_time
async def test_a_silent_exporter_is_given_up() -> None:
    ends, rig = Ends([], {"a": plain}), Rig()

    async def silent(stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        while await stream.receive() is not None:
            pass

    ends.rig = rig
    await memory.create(rig.network).serve("p", PullHandler(silent))
    ends.puller = replace(ends.puller, link=rig.puller().link)
    with pytest.raises(PeerSilent):
        await ends.peer().verify()
    assert asyncio.get_running_loop().time() == pytest.approx(CONFIG.silence_seconds)


@in_virtual_time
async def test_blocks_that_were_announced_and_do_not_come_are_not_waited_for() -> None:
    class Stuck(InlineEnd):
        async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
            await asyncio.Event().wait()
            raise AssertionError

    ends = Ends(["a", "b"], {"a": bent(Stuck), "b": plain})
    await ends.serve()
    assert (await ends.peer().inlet()).transport == "b"


@in_virtual_time
async def test_an_exporter_that_fails_in_the_middle_of_a_probe() -> None:
    class Failing(InlineEnd):
        packs = 0

        async def pack(self, blocks: Sequence[int]) -> Packed:
            Failing.packs += 1
            if Failing.packs == PROBE_CHUNKS:
                raise HandoverFailed("no such channel")
            return await super().pack(blocks)

    ends = Ends(["a", "b"], {"a": plain, "b": plain})
    ends.offer._transports = {**ends.offer._transports, "a": bent(Failing)(ends.prefill.store)}
    await ends.serve()
    assert (await ends.peer().inlet()).transport == "b"


@in_virtual_time
async def test_a_connection_that_broke_is_replaced_once() -> None:
    ends = Ends(["a"], {"a": Breaking})
    transport = ends.puller.transports["a"]
    assert isinstance(transport, Breaking)
    transport.left = 2  # one is for the probe
    await ends.serve()
    peer = ends.peer()
    (await peer.inlet()).close(reuse=True)
    with pytest.raises(HandoverFailed):  # the probe of its successor has no inlet left either
        await peer.inlet()
    assert transport.closed == 2
    assert not peer.verified
    await peer.broken()
    transport.left = 2
    await peer.inlet()
    assert peer.verified


@in_virtual_time
async def test_whoever_waits_for_a_link_may_leave() -> None:
    ends = Ends(["a"], {"a": plain})
    await ends.serve()
    peer = ends.peer()
    first, second = asyncio.create_task(peer.inlet()), asyncio.create_task(peer.inlet())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    assert (await second).transport == "a"


@in_virtual_time
async def test_a_channel_that_is_not_to_be_had_breaks_no_other_hand_over() -> None:
    ends = Ends(["a"], {"a": Breaking})
    transport = ends.puller.transports["a"]
    assert isinstance(transport, Breaking)
    transport.left = 2
    await ends.serve()
    peer = ends.peer()
    running = await peer.inlet()
    with pytest.raises(HandoverFailed):
        await peer.inlet()
    assert transport.closed == 1  # the one whose probe failed
    running.close(reuse=True)
    transport.left = 3
    for _ in range(2):
        (await peer.inlet()).close(reuse=True)
    with pytest.raises(HandoverFailed):
        await peer.inlet()
    assert transport.closed == 4  # nobody uses those before it any more
    await peer.close()
    assert transport.closed == 4


class Changes:
    """What `on_change` saw."""

    def __init__(self) -> None:
        self.linked: list[bool] = []
        self.peers: Peers | None = None

    def __call__(self) -> None:
        assert self.peers is not None
        self.linked.append(self.peers.linked)


def worker(worker_id: str = "prefill-0", role: Role = Role.PREFILL, incarnation: int = INCARNATION) -> WorkerInfo:
    return WorkerInfo(worker_id, role, "p", incarnation, 1)


def is_linked(peers: Peers) -> bool:
    return peers.linked


@in_virtual_time
async def test_links_follow_the_registry() -> None:
    ends, changes = Ends(["a"], {"a": Breaking}), Changes()
    transport = ends.puller.transports["a"]
    assert isinstance(transport, Breaking)
    transport.left = 100
    snapshots: asyncio.Queue[list[WorkerInfo]] = asyncio.Queue()

    async def watch() -> AsyncGenerator[list[WorkerInfo]]:
        while True:
            yield await snapshots.get()

    async with asyncio.TaskGroup() as tasks:
        changes.peers = peers = Peers(ends.puller, tasks, changes)
        following = tasks.create_task(peers.follow(watch()))
        snapshots.put_nowait([worker("decode-0", Role.DECODE), worker("router-0", Role.ROUTER)])
        await asyncio.sleep(1)
        assert changes.linked == []
        snapshots.put_nowait([worker()])
        await asyncio.sleep(0.1)  # nobody serves yet
        assert changes.linked == []
        await ends.serve()
        await asyncio.sleep(1)
        assert changes.linked == [True]
        snapshots.put_nowait([])
        await asyncio.sleep(CONFIG.lease_seconds - 1)
        assert is_linked(peers)  # a lapsed entry stops nothing
        snapshots.put_nowait([worker()])
        await asyncio.sleep(2)
        assert (changes.linked, transport.closed) == ([True], 0)
        snapshots.put_nowait([])
        await asyncio.sleep(3 * CONFIG.lease_seconds)
        assert is_linked(peers)  # it answers
        ends.rig.network.kill("p")
        snapshots.put_nowait([worker(incarnation=INCARNATION + 1)])
        await asyncio.sleep(CONFIG.lease_seconds + 1)
        assert (changes.linked, transport.closed) == ([True, False], 1)  # the old life is gone, the new one stale
        await ends.serve()
        snapshots.put_nowait([worker()])
        await asyncio.sleep(6)
        assert is_linked(peers)
        transport.left = 0
        with pytest.raises(HandoverFailed):
            await peers.inlet(SOURCE)
        assert not is_linked(peers)
        transport.left = 1
        await asyncio.sleep(6)
        assert is_linked(peers)  # it is set up again without anybody asking
        following.cancel()
        await peers.close()
        assert not is_linked(peers)


@in_virtual_time
async def test_a_worker_that_the_registry_never_names_is_forgotten() -> None:
    ends = Ends(["a"], {"a": plain})
    await ends.serve()
    async with asyncio.TaskGroup() as tasks:
        peers = Peers(ends.puller, tasks, lambda: None)
        opened = await peers.inlet(SOURCE)
        assert opened.transport == "a"
        opened.close(reuse=True)
        assert is_linked(peers)
        await asyncio.sleep(CONFIG.lease_seconds + 0.1)
        assert not is_linked(peers)
        await peers.close()

"""Cached blocks by their content: what a worker has of a prefix goes out like any export, and nothing else does."""

import asyncio

import pytest

from contracts.errors import DeadlineExceeded, PdserveError, PullGone, PullNotFound, Stale
from contracts.handover import Ack, Alive, Chunk, ExporterMessage, Fetch, Last, Pull, PullerMessage, PullFailed
from contracts.requests import AttemptKey
from contracts.session import Source
from kv_transfer.orders import FetchOrder, TransferStats
from kv_transfer.receiver import Receiver
from protos.links import memory
from protos.links.base import Duplex
from tests.helpers.handover import (
    BLOCK_SIZE,
    CONFIG,
    INCARNATION,
    TICKET,
    Prefill,
    Rig,
    fetch,
    in_virtual_time,
    pull,
    settle,
)

HASHES = (b"first", b"second", b"third")
KEY = AttemptKey("1-1/prefix", 1)
PULLED = AttemptKey("1-1", 1)


async def holder(*cached: bytes) -> tuple[Prefill, Rig]:
    """A worker that has these blocks in its cache, in blocks 20, 21, ..."""
    p, rig = Prefill(), Rig()
    p.book.cached = {block_hash: 20 + index for index, block_hash in enumerate(cached)}
    await rig.serve(p.exporter.serve)
    return p, rig


async def receive(rig: Rig, hashes: tuple[bytes, ...] = HASHES, deadline: float = 600.0) -> TransferStats:
    order = FetchOrder(KEY, Source("prefill-0", "p", INCARNATION), range(40, 40 + len(hashes)), hashes, "", deadline)
    return await Receiver(rig.puller(), rig._inlet).receive(order, rig.commit)


@pytest.mark.parametrize(
    ("cached", "found"),
    [(HASHES, 3), (HASHES[:2], 2), ((b"first", b"third"), 1), ((*HASHES, b"fourth"), 3)],
)
def test_the_longest_run_that_is_cached_arrives(cached: tuple[bytes, ...], found: int) -> None:
    @in_virtual_time
    async def check() -> None:
        p, rig = await holder(*cached)
        stats = await receive(rig)
        assert stats.blocks == found
        (last,) = rig.committed
        assert (last.token, last.blocks, last.kv_tokens) == (None, found, found * BLOCK_SIZE)
        blocks = [p.book.cached[block_hash] for block_hash in HASHES[:found]]
        assert [rig.store.data[40 + i] for i in range(found)] == [p.store.data[block] for block in blocks]
        assert set(rig.store.writes) == set(range(40, 40 + found))
        await settle()
        assert (p.book.pinned, p.book.unpinned, p.exports.leases()) == ({}, [KEY], 0)
        p.exports.check()

    check()


@pytest.mark.parametrize("cached", [(), (b"second", b"third")])
def test_without_the_first_block_there_is_nothing_to_give(cached: tuple[bytes, ...]) -> None:
    @in_virtual_time
    async def check() -> None:
        p, rig = await holder(*cached)
        with pytest.raises(PullNotFound):
            await receive(rig)
        assert (p.book.pinned, p.book.unpinned, rig.committed) == ({}, [], [])
        p.exports.check()

    check()


async def ask(rig: Rig, message: Fetch) -> tuple[Duplex[PullerMessage, ExporterMessage], ExporterMessage | None]:
    stream = await memory.create(rig.network).open_pull("p")
    await stream.send(message)
    return stream, await stream.receive()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (fetch(KEY, HASHES, secret="guess"), PullNotFound),
        (fetch(KEY, HASHES, incarnation=1), Stale),
        (fetch(KEY, ()), PullNotFound),
    ],
)
def test_a_fetch_is_refused_as_a_pull_is(message: Fetch, error: type[PdserveError]) -> None:
    @in_virtual_time
    async def check() -> None:
        p, rig = await holder(*HASHES)
        _, answer = await ask(rig, message)
        assert isinstance(answer, PullFailed)
        assert isinstance(answer.error.to_error(), error)
        assert p.book.pinned == {}

    check()


@in_virtual_time
async def test_a_fetch_is_served_once() -> None:
    p, rig = await holder(*HASHES)
    first, answer = await ask(rig, fetch(KEY, HASHES))
    assert isinstance(answer, Chunk)
    _, answer = await ask(rig, fetch(KEY, HASHES))
    assert isinstance(answer, PullFailed)
    assert isinstance(answer.error.to_error(), PullGone)
    assert p.exports.leases() == 1
    await first.close()
    await settle()
    _, answer = await ask(rig, fetch(KEY, HASHES))
    assert isinstance(answer, PullFailed)  # of the ended one a tombstone is left
    assert (p.exports.leases(), p.exports.dropped) == (0, 2)


@in_virtual_time
async def test_what_was_lent_stays_for_its_lease_and_as_long_as_it_is_renewed() -> None:
    p, rig = await holder(*HASHES)
    stream, _ = await ask(rig, fetch(KEY, HASHES))
    await asyncio.sleep(CONFIG.lease_seconds - 1)
    await stream.send(Alive())
    await asyncio.sleep(CONFIG.lease_seconds - 1)
    assert p.exports.owners() == {KEY: [20, 21, 22]} or p.exports.owners() == {KEY: (20, 21, 22)}
    assert p.exports.pinned_tokens() == 3 * BLOCK_SIZE  # it counts against the backlog
    await asyncio.sleep(1.1)
    assert p.book.unpinned == [KEY]
    p.exports.check()


@in_virtual_time
async def test_never_beyond_the_request() -> None:
    p, rig = await holder(*HASHES)
    stream, _ = await ask(rig, fetch(KEY, HASHES, deadline_ms=2000))
    await asyncio.sleep(1)
    await stream.send(Alive())
    await asyncio.sleep(1.1)
    assert p.book.unpinned == [KEY]
    seen: list[ExporterMessage | None] = []
    while seen[-1:] != [None]:
        seen.append(await stream.receive())
    assert any(isinstance(message, Last) for message in seen)
    failed = seen[-2]
    assert isinstance(failed, PullFailed)
    assert isinstance(failed.error.to_error(), DeadlineExceeded)


@in_virtual_time
async def test_a_pull_cannot_take_over_what_was_lent() -> None:
    p, rig = await holder(*HASHES)
    await ask(rig, fetch(KEY, HASHES))
    stream = await memory.create(rig.network).open_pull("p")
    await stream.send(pull(KEY, ticket=b""))
    answer = await stream.receive()
    assert isinstance(answer, PullFailed)
    assert isinstance(answer.error.to_error(), PullNotFound)
    assert p.exports.leases() == 1
    assert not p.exports.open(KEY, TICKET, 600.0)  # nor may an attempt have its name
    p.exports.check()


@pytest.mark.parametrize("first", [fetch(KEY, HASHES), pull(PULLED)])
def test_a_first_message_that_comes_twice_changes_nothing(first: Pull | Fetch) -> None:
    @in_virtual_time
    async def check() -> None:
        p, rig = await holder(*HASHES)
        p.exports.open(PULLED, TICKET, 600.0)
        p.exports.attach(PULLED, range(10, 15))
        stream = await memory.create(rig.network).open_pull("p")
        await stream.send(first)
        await stream.send(first)
        await settle()
        assert first.key in p.exports.owners()
        await stream.send(Ack())
        await settle()
        assert first.key not in p.exports.owners()

    check()

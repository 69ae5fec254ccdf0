"""The states of an export, one transition after the other."""

import asyncio
from collections.abc import Callable

import pytest

from contracts.errors import EngineFailed
from contracts.handover import Ended, PullFailed
from contracts.requests import AttemptKey, FinishReason
from kv_transfer.exports import Exports
from kv_transfer.subscription import Subscription
from tests.helpers.handover import BLOCK_SIZE, CONFIG, KEY, TICKET, Book, Prefill, in_virtual_time, pull, token


def told(subscription: Subscription) -> str:
    """How it ended: "" by the puller itself, "ended", or the code of the error. "open": it goes on."""
    if not subscription.over.is_set():
        return "open"
    final = subscription.final
    if final is None:
        return ""
    return final.error.code if isinstance(final, PullFailed) else "ended"


@in_virtual_time
async def test_blocks_become_ready_as_they_are_computed() -> None:
    p = Prefill()
    p.open()
    subscription = p.exports.subscribe(pull())
    p.attach()
    export = subscription.export
    assert export is not None
    ready = []
    for computed in (3, 4, 11, 16):
        p.exports.publish(KEY, computed)
        ready.append(export.ready)
        p.exports.check()
    assert ready == [0, 1, 2, 4]
    p.finish(18)
    assert (export.ready, export.kv_tokens, p.exports.pinned_tokens()) == (5, 18, 18)
    p.exports.leave(subscription)
    assert (p.exports.leases(), p.exports.pinned_tokens(), p.book.unpinned) == (0, 0, [KEY])
    p.exports.check()


@in_virtual_time
async def test_the_pin_starts_at_attach_and_is_listed_for_the_auditor() -> None:
    p = Prefill()
    p.open()
    assert (p.exports.leases(), p.exports.owners()) == (0, {})
    p.attach(3)
    p.attach(3)
    assert p.exports.owners() == p.book.pinned == {KEY: (10, 11, 12)}


@in_virtual_time
async def test_an_early_pull_is_parked_and_served_when_its_submit_comes() -> None:
    p = Prefill()
    subscription = p.exports.subscribe(pull())
    await asyncio.sleep(CONFIG.park_seconds - 0.1)
    assert told(subscription) == "open"
    p.open()
    await asyncio.sleep(1)
    assert told(subscription) == "open"
    assert subscription.export is not None
    p.exports.check()


@in_virtual_time
async def test_a_parked_pull_ends_when_no_submit_comes() -> None:
    p = Prefill()
    subscription = p.exports.subscribe(pull())
    await asyncio.sleep(CONFIG.park_seconds + 0.1)
    assert told(subscription) == "pull_not_found"
    p.exports.check()
    assert p.open()


@in_virtual_time
async def test_a_wrong_ticket_is_refused_in_every_state_and_disturbs_nobody() -> None:
    p = Prefill()
    stranger, friend = p.exports.subscribe(pull(ticket=b"w" * 16)), p.exports.subscribe(pull())
    assert told(stranger) == "open"  # unknown attempts look alike
    p.open()
    assert (told(stranger), told(friend)) == ("pull_not_found", "open")
    p.attach()
    assert told(p.exports.subscribe(pull(ticket=b""))) == "pull_not_found"
    assert told(friend) == "open"
    p.exports.cancel(KEY, "test")
    assert told(p.exports.subscribe(pull(ticket=b"w" * 16))) == "pull_not_found"
    assert told(p.exports.subscribe(pull())) == "pull_gone"


@in_virtual_time
async def test_a_newer_pull_replaces_the_older_one() -> None:
    p = Prefill()
    p.open()
    older = p.exports.subscribe(pull())
    newer = p.exports.subscribe(pull())
    assert (told(older), told(newer)) == ("pull_gone", "open")
    p.attach()
    p.exports.leave(older)
    assert p.exports.leases() == 1
    p.exports.check()
    p.exports.leave(newer)
    assert p.exports.leases() == 0


@in_virtual_time
async def test_a_cancel_before_its_submit_leaves_a_tombstone() -> None:
    p = Prefill()
    parked = p.exports.subscribe(pull())
    p.exports.cancel(KEY, "client gone")
    assert told(parked) == "cancelled"
    assert not p.open()
    p.attach()
    p.exports.publish(KEY, 8)
    p.finish()
    assert (p.book.pinned, p.book.unpinned, p.exports.dropped) == ({}, [], 4)
    assert told(p.exports.subscribe(pull())) == "pull_gone"
    p.exports.check()


@pytest.mark.parametrize(
    "stage",
    [Prefill.open, lambda p: (p.open(), p.attach()), Prefill.compute_all],
    ids=["open", "filling", "ready"],
)
@pytest.mark.parametrize("subscribed", [True, False])
def test_failure_is_accepted_in_every_state_and_releases_at_once(
    stage: Callable[[Prefill], object], subscribed: bool
) -> None:
    @in_virtual_time
    async def check() -> None:
        p = Prefill()
        stage(p)
        had = dict(p.book.pinned)
        subscription = p.exports.subscribe(pull()) if subscribed else None
        for _ in range(2):
            p.exports.fail(KEY, EngineFailed("step failed"))
        assert p.book.pinned == {}
        assert p.book.unpinned == list(had)
        if subscription is not None:
            assert told(subscription) == "engine_failed"
        p.exports.check()

    check()


@in_virtual_time
async def test_a_first_token_that_ends_the_request_ends_the_export() -> None:
    p = Prefill()
    p.open()
    p.attach()
    subscription = p.exports.subscribe(pull())
    p.finish(finish=FinishReason.STOP)
    assert told(subscription) == "ended"
    assert p.book.unpinned == [KEY]
    assert isinstance(p.exports.subscribe(pull()).final, Ended)  # also for a Pull that comes late


@in_virtual_time
async def test_without_a_puller_the_lease_starts_when_the_prompt_is_computed() -> None:
    p = Prefill()
    p.open()
    p.attach()
    await asyncio.sleep(CONFIG.lease_seconds + 1)
    assert p.exports.leases() == 1
    p.finish()
    await asyncio.sleep(CONFIG.lease_seconds - 0.1)
    assert p.exports.leases() == 1
    await asyncio.sleep(0.2)
    assert (p.exports.leases(), p.book.unpinned) == (0, [KEY])
    assert told(p.exports.subscribe(pull())) == "pull_gone"


@in_virtual_time
async def test_only_alive_renews_a_lease() -> None:
    p = Prefill()
    p.open()
    p.attach()
    subscription = p.exports.subscribe(pull())
    for _ in range(3):
        await asyncio.sleep(CONFIG.lease_seconds - 0.1)
        p.exports.renew(subscription)
    await asyncio.sleep(1)
    p.exports.publish(KEY, 16)
    await asyncio.sleep(1)
    p.finish()
    await asyncio.sleep(CONFIG.lease_seconds - 2.1)
    assert told(subscription) == "open"
    await asyncio.sleep(0.2)
    assert told(subscription) == "pull_gone"
    assert p.book.unpinned == [KEY]
    p.exports.renew(subscription)
    assert p.exports.dropped == 1


@in_virtual_time
async def test_no_lease_outlives_the_deadline() -> None:
    p = Prefill()
    p.open(deadline=20.0)
    p.attach()
    subscription = p.exports.subscribe(pull())
    for _ in range(4):
        await asyncio.sleep(4.9)
        p.exports.renew(subscription)
    assert told(subscription) == "open"
    await asyncio.sleep(0.5)
    assert told(subscription) == "deadline_exceeded"
    assert p.exports.leases() == 0


@in_virtual_time
async def test_a_prompt_that_is_still_queued_survives_the_end_of_its_pull() -> None:
    p = Prefill()
    p.open()
    p.exports.leave(p.exports.subscribe(pull()))
    p.attach()
    assert p.exports.leases() == 1
    p.exports.check()


@pytest.mark.parametrize("first_block", [-1, 6])
def test_a_pull_outside_the_prompt_is_refused(first_block: int) -> None:
    @in_virtual_time
    async def check() -> None:
        p = Prefill()
        p.open()
        subscription = p.exports.subscribe(pull(first_block=first_block))
        p.attach()
        assert told(subscription) == "handover_failed"
        assert p.book.pinned == {}

    check()


@in_virtual_time
async def test_more_computed_than_attached_is_our_own_fault() -> None:
    p = Prefill()
    p.open()
    with pytest.raises(ValueError, match="its blocks are"):
        p.exports.publish(KEY, 4)
    p.attach(2)
    with pytest.raises(ValueError, match="its blocks are"):
        p.finish(9)


@in_virtual_time
async def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    book = Book()
    exports = Exports(book, asyncio.get_running_loop(), block_size=BLOCK_SIZE, config=CONFIG, tombstones=3)
    keys = [AttemptKey(f"1-{n}", 1) for n in range(5)]
    for key in keys:
        exports.open(key, TICKET, 600.0)
        exports.cancel(key, "test")
        exports.check()
    assert [told(exports.subscribe(pull(key))) for key in keys] == ["open"] * 2 + ["pull_gone"] * 3


@in_virtual_time
async def test_queued_before_counts_prompts_without_blocks() -> None:
    exports = Exports(Book(), asyncio.get_running_loop(), block_size=BLOCK_SIZE, config=CONFIG)
    keys = [AttemptKey(f"1-{n}", 1) for n in range(4)]
    for key in keys:
        exports.open(key, TICKET, 600.0)
    exports.attach(keys[1], [1])
    exports.finish(keys[1], token(), 4)
    assert [exports.queued_before(key) for key in keys] == [0, 1, 1, 2]

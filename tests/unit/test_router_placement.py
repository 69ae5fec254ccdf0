"""RouterService.generate against workers that differ: who can hold a request, who waits, who is passed over."""

import asyncio
import math
from dataclasses import replace

import pytest

from contracts.errors import DeadlineExceeded, KvCapacityExceeded, NotReady
from contracts.requests import FinishReason
from contracts.session import Reserved, Tokens
from contracts.workers import Role
from tests.helpers.router_rig import PAIR, FakeWorker, Rig, idle, request, rig, token, virtual

STOP = FinishReason.STOP
Spec = tuple[str, Role, dict[str, int]]

UNEQUAL: tuple[Spec, ...] = (
    ("p0", Role.PREFILL, {}),
    ("d0", Role.DECODE, {"slots": 1}),
    ("d1", Role.DECODE, {"blocks": 8}),
)


async def fill(worker: FakeWorker) -> None:
    """It has no slot left."""
    worker.load = replace(worker.load, free_slots=0)
    await worker.say()
    await idle()


async def finish(worker: FakeWorker) -> None:
    """Its next request gets its one token."""
    key = (await worker.submits.get()).key
    await worker.say(Reserved(key), Tokens(key, (token(1, STOP),)))


@pytest.mark.parametrize("small", [{"blocks": 32}, {"max_context": 512}])
@virtual
async def test_a_request_goes_where_it_fits_to_its_end(small: dict[str, int]) -> None:
    spec: tuple[Spec, ...] = (("p0", Role.PREFILL, small), ("p1", Role.PREFILL, {}), ("d0", Role.DECODE, small))
    async with rig(*spec, ("d1", Role.DECODE, {})) as (router, workers):
        # either would have room for it at the start
        call = router.ask(request(prompt=400, max_tokens=300))
        await finish(workers["d1"])
        assert await call.end() == [1]
        assert workers["d0"].submits.empty()
        # a prompt that any prefill worker can compute
        assert workers["p0"].submits.empty() == ("max_context" in small)


@virtual
async def test_what_no_single_worker_can_hold_is_refused_at_once() -> None:
    wide, deep = {"blocks": 16, "max_context": 1024}, {"blocks": 64, "max_context": 256}
    async with rig(("p0", Role.PREFILL, {}), ("d0", Role.DECODE, wide), ("d1", Role.DECODE, deep)) as (router, _):
        assert router.service.token_limit() == 256
        with pytest.raises(KvCapacityExceeded, match="decode worker holds 256 tokens"):
            await router.ask(request(prompt=200, max_tokens=100)).end()


@virtual
async def test_one_who_lost_the_last_worker_that_could_hold_it_is_passed_over_and_ends_in_time() -> None:
    async with rig(*UNEQUAL) as (router, workers):
        d0, d1 = workers["d0"], workers["d1"]
        await fill(d0)
        large, small = router.ask(request(prompt=600)), router.ask(request())
        await idle()
        assert router.observed.waiting() == 2
        d0.kill()
        router.registry.remove("d0")
        lost_at = asyncio.get_running_loop().time()
        await finish(d1)
        assert await small.end() == [1]
        assert asyncio.get_running_loop().time() == pytest.approx(lost_at)
        for _ in range(4):  # others that come and go make no difference
            await asyncio.sleep(1)
            d1.kill()
            await d1.come_back()
            router.registry.put(d1.info)
        with pytest.raises(NotReady, match="no worker that could serve"):
            await large.end()
        assert router.observed.all("queue_wait")[-1] == ("gave_up", pytest.approx(3.0, abs=0.01))


@virtual
async def test_one_who_was_passed_over_is_first_again_when_a_worker_for_it_comes() -> None:
    async with rig(*UNEQUAL) as (router, workers):
        d0, d1 = workers["d0"], workers["d1"]
        await fill(d0)
        await fill(d1)
        large, small = router.ask(request(prompt=600)), router.ask(request())
        d0.kill()
        await asyncio.sleep(2)
        d0.load = replace(d0.load, free_slots=1)
        await d0.come_back()
        router.registry.put(d0.info)
        await asyncio.sleep(2)
        assert (await d0.submits.get()).key.request_id == "7-1"
        assert router.observed.waiting() == 1
        await small.cancel()
        await large.cancel()


@virtual
async def test_a_worker_that_says_it_drains_gets_nothing_new_and_finishes_its_own() -> None:
    async with rig(*PAIR) as (router, workers):
        d = workers["d0"]
        running = router.ask(request())
        key = (await d.submits.get()).key
        await d.reserved(key)
        await fill(d)
        waiting = router.ask(request())
        await idle()
        d.load = replace(d.load, free_slots=7, draining=True)
        await d.say()
        await idle()
        assert d.submits.empty()
        assert not router.service.ready()
        with pytest.raises(NotReady, match="no decode worker"):
            await router.ask(request()).end()
        with pytest.raises(NotReady, match="no worker that could serve"):
            await waiting.end()
        await d.tokens(key, token(1, STOP))
        assert await running.end() == [1]


@virtual
async def test_a_request_that_cannot_be_dispatched_fails_alone_and_holds_nothing() -> None:
    async with rig(*PAIR) as (router, workers):
        d = workers["d0"]
        await fill(d)
        before, broken, after = router.ask(request()), router.ask(request(timeout=math.inf)), router.ask(request())
        await idle()
        d.load = replace(d.load, free_slots=8)
        await d.say()
        with pytest.raises(OverflowError):  # infinity in milliseconds
            await broken.end()
        with pytest.raises(OverflowError):  # also at once, on its arrival
            await router.ask(request(timeout=math.inf)).end()
        for call in (before, after):
            await finish(d)
            assert await call.end() == [1]


@virtual
async def test_the_wait_is_counted_once_per_request_from_its_arrival() -> None:
    async with rig(*PAIR) as (router, workers):
        d = workers["d0"]
        await fill(d)
        late, placed = router.ask(request(timeout=1.0)), router.ask(request())
        with pytest.raises(DeadlineExceeded):
            await late.end()
        await asyncio.sleep(1)
        d.load = replace(d.load, free_slots=1)
        await d.say()
        key = (await d.submits.get()).key
        d.kill()
        await asyncio.sleep(1)
        await d.come_back()
        router.registry.put(d.info)
        await finish(d)
        assert await placed.end() == [1]
        assert key.attempt == 1
        waits = [(outcome, pytest.approx(seconds, abs=0.01)) for outcome, seconds in (("gave_up", 1), ("placed", 2))]
        assert router.observed.all("queue_wait") == waits


@virtual
async def test_running_is_what_is_placed_on_workers() -> None:
    async def figures(router: Rig) -> tuple[int, int]:
        await idle()
        return router.observed.running(), router.observed.waiting()

    async with rig(*PAIR) as (router, workers):
        d = workers["d0"]
        generator = router.service.generate(request())
        reading = asyncio.ensure_future(anext(generator))
        assert await figures(router) == (1, 0)
        d.kill()
        assert await figures(router) == (0, 1)
        await d.come_back()
        router.registry.put(d.info)
        assert await figures(router) == (1, 0)
        await d.submits.get()
        key = (await d.submits.get()).key
        await d.say(Reserved(key), Tokens(key, (token(1),)))
        await reading
        await d.tokens(key, token(2, STOP))
        assert await figures(router) == (0, 0)  # the worker is done with it, whoever still reads
        await generator.aclose()

"""RouterService.generate against scripted workers: the undisturbed life of a request, and its bounds."""

import asyncio
from dataclasses import replace

import pytest

from contracts.config import Config, RouterConfig
from contracts.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    KvCapacityExceeded,
    NotReady,
    Overloaded,
)
from contracts.requests import FinishReason
from contracts.session import Reserved, Source, Tokens
from contracts.workers import Role, WorkerLoad, WorkerState
from tests.helpers.router_rig import PAIR, idle, request, rig, token, virtual

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


@virtual
async def test_both_legs_go_out_at_once_and_tokens_come_in_order_each_once() -> None:
    async with rig(*PAIR) as (router, workers):
        p, d = workers["p0"], workers["d0"]
        call = router.ask(request(max_tokens=4))
        on_p, on_d = await p.submits.get(), await d.submits.get()
        assert on_p.key == on_d.key
        assert on_p.key.request_id == "7-1"
        assert on_p.key.attempt == 1
        assert on_p.ticket == on_d.ticket
        assert len(on_p.ticket) == 16
        assert on_p.source is None
        assert on_d.source == Source("p0", "p0:1", 1)
        assert 0 < on_p.deadline_ms <= 60_000
        await d.reserved(on_d.key)
        await p.tokens(on_p.key, token(1), cached=16)
        await idle()
        assert call.positions == [1]  # straight from prefill, before decode has anything
        await d.tokens(on_d.key, token(1), token(2), token(3))
        await idle()
        await d.tokens(on_d.key, token(4, LENGTH))
        assert await call.end() == [1, 2, 3, 4]
        assert [len(output.tokens) for output in call.outputs] == [1, 2, 1]  # what comes together goes together
        assert call.outputs[0].cached_tokens == 16
        await idle()
        assert p.cancels.empty()
        assert d.cancels.empty()
        assert router.observed.all("finished") == ["length"]


@virtual
async def test_decode_may_bring_the_first_token_before_prefill() -> None:
    async with rig(*PAIR) as (router, workers):
        p, d = workers["p0"], workers["d0"]
        call = router.ask(request())
        key = (await d.submits.get()).key
        await d.say(Reserved(key), Tokens(key, (token(1), token(2))))
        await idle()
        assert call.positions == [1, 2]
        await p.tokens(key, token(1), cached=16)
        await d.tokens(key, token(3, STOP))
        assert await call.end() == [1, 2, 3]
        assert call.outputs[-1].cached_tokens == 16


@virtual
async def test_a_token_that_came_before_its_predecessor_is_held_back() -> None:
    async with rig(*PAIR) as (router, workers):
        p, d = workers["p0"], workers["d0"]
        call = router.ask(request())
        key = (await d.submits.get()).key
        await d.say(Reserved(key), Tokens(key, (token(2), token(3, STOP))))
        await idle()
        assert call.positions == []
        await p.tokens(key, token(1))
        assert await call.end() == [1, 2, 3]


@virtual
async def test_nothing_goes_out_before_reserved() -> None:
    async with rig(*PAIR) as (router, workers):
        p, d = workers["p0"], workers["d0"]
        call = router.ask(request())
        key = (await p.submits.get()).key
        await p.tokens(key, token(1))
        await idle()
        assert call.outputs == []
        await d.reserved(key)
        await idle()
        assert call.positions == [1]
        await call.cancel()


@virtual
async def test_one_token_needs_no_decode_worker() -> None:
    async with rig(*PAIR) as (router, workers):
        call = router.ask(request(max_tokens=1))
        key = (await workers["p0"].submits.get()).key
        await workers["p0"].tokens(key, token(1, LENGTH))
        assert await call.end() == [1]
        assert workers["d0"].submits.empty()
        assert workers["d0"].cancels.empty()


@virtual
async def test_a_first_token_that_finishes_ends_the_request_and_cancels_decode() -> None:
    async with rig(*PAIR) as (router, workers):
        call = router.ask(request())
        key = (await workers["p0"].submits.get()).key
        await workers["p0"].tokens(key, token(1, STOP))
        assert await call.end() == [1]
        assert (await workers["d0"].cancels.get()).key == key
        assert workers["p0"].cancels.empty()


def aggregated(config: Config) -> Config:
    return replace(config, cluster=replace(config.cluster, mode="aggregated"))


@virtual
async def test_aggregated_decode_computes_the_prompt() -> None:
    async with rig(("d0", Role.DECODE, {}), settings=aggregated) as (router, workers):
        call = router.ask(request(max_tokens=2))
        submit = await workers["d0"].submits.get()
        assert submit.source is None
        await workers["d0"].reserved(submit.key)
        await workers["d0"].tokens(submit.key, token(1), cached=3)
        await workers["d0"].tokens(submit.key, token(2, LENGTH))
        assert await call.end() == [1, 2]
        assert call.outputs[0].cached_tokens == 3


@virtual
async def test_a_full_queue_refuses_at_once_and_serves_the_rest_in_order() -> None:
    def small(config: Config) -> Config:
        return replace(config, router=RouterConfig(queue_requests=2))

    async with rig(("p0", Role.PREFILL, {}), ("d0", Role.DECODE, {"slots": 1}), settings=small) as (router, workers):
        d = workers["d0"]
        d.load = WorkerLoad(64, 0, 0, 1, 0)  # what it reports from then on: the one slot is taken
        calls = [router.ask(request()) for _ in range(5)]
        asked_at = asyncio.get_running_loop().time()
        await asyncio.wait([call.task for call in calls[3:]])
        assert asyncio.get_running_loop().time() == asked_at
        for call in calls[3:]:
            with pytest.raises(Overloaded, match="2 of 2 requests") as refused:
                await call.end()
            assert isinstance(refused.value.retry_after, int)
            assert 1 <= refused.value.retry_after <= 60
        assert router.observed.all("refused") == ["overloaded", "overloaded"]
        for number, call in enumerate(calls[:3], start=1):
            submit = await d.submits.get()
            assert submit.key.request_id == f"7-{number}"
            assert d.submits.empty()
            d.load = WorkerLoad(64, 1, 0, 0, 0)
            await d.say(Reserved(submit.key), Tokens(submit.key, (token(1, STOP),)))
            assert await call.end() == [1]
            d.load = WorkerLoad(64, 0, 0, 1, 0)


@virtual
async def test_prefill_backlog_holds_the_next_request_until_a_prompt_is_computed() -> None:
    async with rig(("p0", Role.PREFILL, {"backlog_tokens": 30}), ("d0", Role.DECODE, {})) as (router, workers):
        p, d = workers["p0"], workers["d0"]
        calls = [router.ask(request(prompt=n)) for n in (100, 20, 20)]
        first = (await p.submits.get()).key
        await idle()
        assert p.submits.empty()  # an idle worker took more than its backlog, and takes nothing on top
        assert router.observed.waiting() == 2
        await p.tokens(first, token(1))
        await idle()
        assert p.submits.qsize() == 2
        assert router.observed.waiting() == 0
        for call in calls:
            await call.cancel()
        await idle()
        assert d.cancels.qsize() == 3


@virtual
async def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    small_pools = (("p0", Role.PREFILL, {"blocks": 40}), ("d0", Role.DECODE, {"blocks": 50}))
    async with rig(*small_pools) as (router, workers):
        assert router.service.token_limit() == 640
        for asked, error, numbers in (
            (request(prompt=1024), ContextLengthExceeded, "1024"),
            (request(prompt=641), KvCapacityExceeded, "640"),
            (request(prompt=640, max_tokens=161), KvCapacityExceeded, "800"),
            (request(prompt=0), InvalidRequest, "no tokens"),
            (request(max_tokens=0), InvalidRequest, "max_tokens"),
        ):
            with pytest.raises(error, match=numbers):
                await router.ask(asked).end()
        fits = router.ask(request(prompt=640, max_tokens=160))
        await workers["d0"].submits.get()
        await fits.cancel()


@virtual
async def test_max_tokens_are_cut_to_the_context() -> None:
    async with rig(*PAIR) as (router, workers):
        call = router.ask(request(prompt=1000, max_tokens=500))
        assert (await workers["d0"].submits.get()).sampling.max_tokens == 24
        await call.cancel()


@virtual
async def test_without_workers_new_requests_are_not_ready_at_once() -> None:
    async with rig(*PAIR) as (router, workers):
        workers["p0"].kill()
        await idle()
        with pytest.raises(NotReady, match="no prefill worker"):
            await router.ask(request()).end()
        with pytest.raises(NotReady):
            router.service.token_limit()


@virtual
async def test_drain_lets_nobody_in_and_waits_for_the_running() -> None:
    async with rig(*PAIR) as (router, workers):
        d = workers["d0"]
        call = router.ask(request())
        key = (await d.submits.get()).key
        assert not await router.service.drain(1.0)
        assert not router.service.ready()
        with pytest.raises(NotReady, match="draining"):
            await router.ask(request()).end()
        async with asyncio.TaskGroup() as tasks:
            drained = tasks.create_task(router.service.drain(5.0))
            await d.say(Reserved(key), Tokens(key, (token(1, STOP),)))
        assert await call.end() == [1]
        assert drained.result()


@virtual
async def test_stop_ends_running_and_queued_requests() -> None:
    async with rig(("p0", Role.PREFILL, {}), ("d0", Role.DECODE, {"slots": 1})) as (router, _):
        calls = [router.ask(request()) for _ in range(2)]
        await idle()
        await router.service.stop()
        for call in calls:
            with pytest.raises(NotReady, match="stopped"):
                await call.end()


@virtual
async def test_a_draining_worker_gets_no_new_work_and_finishes_its_own() -> None:
    async with rig(*PAIR, ("d1", Role.DECODE, {})) as (router, workers):
        d = workers["d0"]
        first = router.ask(request())
        key = (await d.submits.get()).key
        router.registry.put(replace(d.info, state=WorkerState.DRAINING))
        await idle()
        second = router.ask(request())
        other = (await workers["d1"].submits.get()).key
        for worker, its_key, call in ((d, key, first), (workers["d1"], other, second)):
            await worker.say(Reserved(its_key), Tokens(its_key, (token(1, STOP),)))
            assert await call.end() == [1]

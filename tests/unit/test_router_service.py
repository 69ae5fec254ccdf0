"""RouterService.generate against scripted workers: the life of a request, undisturbed and disturbed."""

import asyncio
from dataclasses import replace

import pytest

from contracts.config import Config, LimitsConfig, RouterConfig
from contracts.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    KvCapacityExceeded,
    NotReady,
    Overloaded,
    PeerSilent,
    Refused,
    WorkerLost,
)
from contracts.requests import FinishReason
from contracts.session import Reserved, Source, Tokens
from contracts.workers import Role, WorkerLoad, WorkerState
from telemetry.tracing import Attribute
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


@pytest.mark.parametrize("refuser", ["p0", "d0"])
@virtual
async def test_a_refusal_cancels_the_other_leg_and_goes_back_to_the_head(refuser: str) -> None:
    one_at_a_time = {"slots": 1}
    async with rig(("p0", Role.PREFILL, {}), ("d0", Role.DECODE, one_at_a_time)) as (router, workers):
        p, d = workers["p0"], workers["d0"]
        first, second = router.ask(request()), router.ask(request())
        key = (await d.submits.get()).key
        await p.submits.get()
        await workers[refuser].failed(key, Refused("no room"))
        other = p if refuser == "d0" else d
        assert (await other.cancels.get()).key == key
        again = await d.submits.get()
        assert again.key == replace(key, attempt=2)
        assert again.relayed == ()
        assert d.submits.empty()  # the second one still waits behind it
        assert router.observed.waiting() == 1
        for call, next_key in ((first, again.key), (second, replace(key, request_id="7-2"))):
            await d.say(Reserved(next_key), Tokens(next_key, (token(1, STOP),)))
            await idle()
            assert await call.end() == [1]


@virtual
async def test_a_refuser_gets_nothing_before_its_next_frame() -> None:
    async with rig(*PAIR, ("d1", Role.DECODE, {})) as (router, workers):
        call = router.ask(request())
        key = (await workers["d0"].submits.get()).key
        await workers["d0"].failed(key, Refused("no room"))
        second = (await workers["d1"].submits.get()).key
        await workers["d1"].failed(second, Refused("no room"))
        third = (await workers["d0"].submits.get()).key  # after its heartbeat
        assert asyncio.get_running_loop().time() >= 0.5
        await workers["d0"].say(Reserved(third), Tokens(third, (token(1, STOP),)))
        assert await call.end() == [1]
        assert third.attempt == 3


@virtual
async def test_a_refused_request_ends_at_its_deadline() -> None:
    async with rig(*PAIR) as (router, workers):
        d = workers["d0"]
        started = asyncio.get_running_loop().time()
        call = router.ask(request(timeout=2.0))
        async with asyncio.TaskGroup() as tasks:

            async def refuse() -> None:
                while True:
                    await d.failed((await d.submits.get()).key, Refused("no room"))

            refusing = tasks.create_task(refuse())
            await asyncio.wait([call.task])
            refusing.cancel()
        with pytest.raises(DeadlineExceeded):
            await call.end()
        assert asyncio.get_running_loop().time() - started == pytest.approx(2.0)
        assert len(router.observed.all("attempt_failed")) > 1


@pytest.mark.parametrize("phase", ["queued", "submitted", "reserved", "first token", "decoding"])
@virtual
async def test_cancel_in_every_phase_tells_both_legs_and_frees_the_books(phase: str) -> None:
    async with rig(*PAIR) as (router, workers):
        p, d = workers["p0"], workers["d0"]
        if phase == "queued":
            d.load = replace(d.load, free_slots=0)
            await d.say()
            await idle()
        call = router.ask(request())
        await idle()
        if phase == "queued":
            assert router.observed.waiting() == 1
            await call.cancel()
            assert router.observed.waiting() == 0
            assert p.submits.empty()
            return
        key = (await p.submits.get()).key
        if phase != "submitted":
            await d.reserved(key)
        if phase in ("first token", "decoding"):
            await p.tokens(key, token(1))
        if phase == "decoding":
            await d.tokens(key, token(1), token(2))
        await idle()
        await call.cancel()
        await idle()
        assert d.cancels.get_nowait().key == key
        # Once decode has tokens it has all blocks, and prefill holds nothing more.
        assert p.cancels.empty() == (phase == "decoding")
        assert router.observed.all("finished") == ["cancelled"]


@virtual
async def test_closing_the_generator_cancels_in_the_same_turn() -> None:
    async with rig(*PAIR) as (router, workers):
        generator = router.service.generate(request())
        reading = asyncio.ensure_future(anext(generator))
        key = (await workers["d0"].submits.get()).key
        await workers["d0"].say(Reserved(key), Tokens(key, (token(1),)))
        await reading
        await generator.aclose()
        assert [view.placed for view in router.service.workers()] == [0, 0]
        assert (await workers["d0"].cancels.get()).key == key


@virtual
async def test_a_message_of_an_old_attempt_is_dropped_and_counted() -> None:
    async with rig(*PAIR) as (router, workers):
        p, d = workers["p0"], workers["d0"]
        call = router.ask(request())
        old = (await p.submits.get()).key
        await d.failed(old, Refused("no room"))
        await idle()
        await p.tokens(old, replace(token(1), token_id=666))
        new = (await p.submits.get()).key
        await d.say(Reserved(new), Tokens(new, (token(1, STOP),)))
        await call.end()
        assert call.outputs[0].tokens[0].token_id == 101
        assert len(router.observed.all("dropped")) == 1


@pytest.mark.parametrize("victim", ["p0", "d0"])
@virtual
async def test_a_worker_lost_before_the_first_token_is_replaced_unseen(victim: str) -> None:
    async with rig(*PAIR, ("p1", Role.PREFILL, {}), ("d1", Role.DECODE, {})) as (router, workers):
        call = router.ask(request())
        await idle()
        key = workers["d0"].submits.get_nowait().key
        await workers["d0"].reserved(key)
        await idle()
        workers[victim].kill()
        await idle()
        survivor = workers["d1" if victim == "d0" else "d0"]
        again = survivor.submits.get_nowait()
        assert again.key == replace(key, attempt=2)
        await survivor.say(Reserved(again.key), Tokens(again.key, (token(1, STOP),)))
        assert await call.end() == [1]
        assert router.observed.all("attempt_failed") == ["worker_lost"]


@virtual
async def test_a_worker_lost_mid_stream_is_followed_by_an_attempt_that_goes_on() -> None:
    async with rig(*PAIR, ("d1", Role.DECODE, {})) as (router, workers):
        p = workers["p0"]
        call = router.ask(request(max_tokens=5))
        key = (await workers["d0"].submits.get()).key
        await p.submits.get()
        await workers["d0"].say(Reserved(key), Tokens(key, (token(1), token(2))))
        await p.tokens(key, token(1), cached=16)
        await idle()
        workers["d0"].kill()
        on_p, on_d = await p.submits.get(), await workers["d1"].submits.get()
        assert on_p.relayed == on_d.relayed == (101, 102)
        assert on_p.sampling.max_tokens == 5
        assert on_p.key.attempt == 2
        await workers["d1"].reserved(on_d.key)
        await p.tokens(on_p.key, token(3), cached=21)
        await workers["d1"].tokens(on_d.key, token(3), token(4), token(5, LENGTH))
        assert await call.end() == [1, 2, 3, 4, 5]
        assert call.outputs[-1].cached_tokens != 21  # what the request cached for itself does not count


@virtual
async def test_prefill_lost_after_its_token_leaves_the_attempt_to_decode() -> None:
    async with rig(*PAIR) as (router, workers):
        p, d = workers["p0"], workers["d0"]
        call = router.ask(request())
        key = (await d.submits.get()).key
        await d.reserved(key)
        await p.tokens(key, token(1))
        await idle()
        p.kill()
        await idle()
        await d.tokens(key, token(1), token(2, STOP))
        assert await call.end() == [1, 2]
        assert router.observed.all("attempt_failed") == []


@virtual
async def test_without_a_spare_the_loss_ends_the_request_in_time() -> None:
    async with rig(*PAIR) as (router, workers):
        call = router.ask(request())
        key = (await workers["d0"].submits.get()).key
        await workers["d0"].say(Reserved(key), Tokens(key, (token(1),)))
        await idle()
        lost_at = asyncio.get_running_loop().time()
        workers["d0"].kill()
        with pytest.raises(WorkerLost, match=r"decode worker d0 was lost.*no other worker"):
            await call.end()
        assert asyncio.get_running_loop().time() - lost_at == pytest.approx(3.0, abs=0.01)
        assert call.positions == [1]


@virtual
async def test_a_worker_that_comes_back_serves_again_as_a_new_incarnation() -> None:
    async with rig(*PAIR) as (router, workers):
        d = workers["d0"]
        call = router.ask(request())
        await idle()
        d.submits.get_nowait()
        d.kill()
        await d.come_back()
        router.registry.put(d.info)
        again = await d.submits.get()
        assert again.incarnation == 2
        await d.say(Reserved(again.key), Tokens(again.key, (token(1, STOP),)))
        assert await call.end() == [1]


@virtual
async def test_losses_are_bounded() -> None:
    def twice(config: Config) -> Config:
        return replace(config, limits=LimitsConfig(attempts=2))

    async with rig(*PAIR, settings=twice) as (router, workers):
        call = router.ask(request())
        for _ in range(3):
            key = (await workers["d0"].submits.get()).key
            await workers["d0"].failed(key, PeerSilent("prefill said nothing"))
        with pytest.raises(PeerSilent):
            await call.end()
        assert key.attempt == 3


@virtual
async def test_an_engine_failure_ends_the_request_and_the_other_leg() -> None:
    async with rig(*PAIR) as (router, workers):
        call = router.ask(request())
        key = (await workers["p0"].submits.get()).key
        await workers["p0"].failed(key, EngineFailed("a step raised"))
        with pytest.raises(EngineFailed, match="a step raised"):
            await call.end()
        assert (await workers["d0"].cancels.get()).key == key
        assert router.observed.all("finished") == ["engine_failed"]


@virtual
async def test_a_frozen_worker_is_lost_after_its_silence() -> None:
    async with rig(*PAIR) as (router, workers):
        call = router.ask(request())
        await workers["d0"].submits.get()
        router.network.freeze("d0:1")
        with pytest.raises(WorkerLost, match="nothing was heard for 3 s"):
            await call.end()
        assert not router.service.ready()


@pytest.mark.parametrize("running", [False, True])
@virtual
async def test_the_deadline_ends_a_queued_and_a_running_request(running: bool) -> None:
    async with rig(*PAIR) as (router, workers):
        if not running:
            workers["d0"].load = replace(workers["d0"].load, free_slots=0)
            await workers["d0"].say()
            await idle()
        call = router.ask(request(timeout=1.5))
        with pytest.raises(DeadlineExceeded):
            await call.end()
        await idle()
        assert workers["d0"].cancels.empty() == (not running)
        assert workers["p0"].cancels.empty() == (not running)


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
        with pytest.raises(NotReady, match="no prefill worker") as raised:
            await router.ask(request()).end()
        assert raised.value.retry_after is not None
        with pytest.raises(NotReady):
            router.service.token_limit()


@virtual
async def test_a_queued_request_does_not_outwait_the_last_worker() -> None:
    async with rig(*PAIR) as (router, workers):
        workers["d0"].load = replace(workers["d0"].load, free_slots=0)
        await workers["d0"].say()
        await idle()
        call = router.ask(request())
        await idle()
        workers["d0"].kill()
        lost_at = asyncio.get_running_loop().time()
        with pytest.raises(NotReady, match="no worker that could serve"):
            await call.end()
        assert asyncio.get_running_loop().time() - lost_at == pytest.approx(3.0, abs=0.01)


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


class Spans:
    """Tracing that keeps every span."""

    def __init__(self) -> None:
        self.started: list[Recorded] = []

    def start(self, name: str, parent: str = "", **attributes: Attribute) -> "Recorded":
        span = Recorded(name, parent, dict(attributes))
        self.started.append(span)
        return span

    def close(self) -> None:
        """Nothing to hand over."""


class Recorded:
    """A span and what was said to it."""

    def __init__(self, name: str, parent: str, attributes: dict[str, Attribute]) -> None:
        self.name, self.parent, self.attributes = name, parent, attributes
        self.traceparent = f"inside {name}"
        self.events: list[str] = []
        self.ended: list[str] = []

    def event(self, name: str, **attributes: Attribute) -> None:
        self.events.append(name)

    def set(self, **attributes: Attribute) -> None:
        self.attributes.update(attributes)

    def end(self, error: str = "") -> None:
        self.ended.append(error)


@virtual
async def test_one_request_is_one_trace() -> None:
    spans = Spans()
    async with rig(*PAIR, tracing=spans) as (router, workers):
        call = router.ask(replace(request(), traceparent="the caller"))
        submit = await workers["d0"].submits.get()
        assert submit.traceparent == "inside pdserve.request"
        await workers["d0"].say(Reserved(submit.key), Tokens(submit.key, (token(1), token(2, STOP))))
        await call.end()
    asked, queued, placed = spans.started
    assert [(span.name, span.parent) for span in spans.started] == [
        ("pdserve.request", "the caller"),
        ("pdserve.queue", "inside pdserve.request"),
        ("pdserve.placement", "inside pdserve.request"),
    ]
    assert asked.events == ["received", "admitted", "placed", "reserved", "first_token", "finished"]
    assert placed.attributes == {
        "policy": "least_loaded",
        "attempt": 1,
        "prefill_worker": "p0",
        "decode_worker": "d0",
    }
    assert asked.ended == queued.ended == placed.ended == [""]


@virtual
async def test_two_requests_of_one_lost_worker_come_back_in_their_order() -> None:
    async with rig(*PAIR, ("d1", Role.DECODE, {"slots": 1})) as (router, workers):
        first_worker, spare = workers["d0"], workers["d1"]
        spare.load = replace(spare.load, free_slots=0)
        await spare.say()
        await idle()
        calls = [router.ask(request()) for _ in range(3)]
        await idle()
        assert first_worker.submits.qsize() == 3
        first_worker.kill()
        await idle()
        for number, call in enumerate(calls, start=1):
            spare.load = replace(spare.load, free_slots=1)
            await spare.say()
            key = (await spare.submits.get()).key
            assert key.request_id == f"7-{number}"
            spare.load = replace(spare.load, free_slots=0)
            await spare.say(Reserved(key), Tokens(key, (token(1, STOP),)))
            assert await call.end() == [1]

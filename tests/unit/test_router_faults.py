"""RouterService.generate against scripted workers: refusals, cancels, lost workers, deadlines."""

import asyncio
from dataclasses import replace

import pytest

from contracts.config import Config, LimitsConfig
from contracts.errors import (
    DeadlineExceeded,
    EngineFailed,
    NotReady,
    PeerSilent,
    Refused,
    WorkerLost,
)
from contracts.requests import FinishReason
from contracts.session import Reserved, Tokens
from contracts.workers import Role
from tests.helpers.router_rig import PAIR, idle, request, rig, token, virtual

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


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
        await p.tokens(key, token(1), cached=16)
        await workers["d0"].say(Reserved(key), Tokens(key, (token(1), token(2))))
        await idle()
        workers["d0"].kill()
        on_p, on_d = await p.submits.get(), await workers["d1"].submits.get()
        assert on_p.relayed == on_d.relayed == (101, 102)
        assert on_p.sampling.max_tokens == 5
        assert on_p.key.attempt == 2
        await workers["d1"].reserved(on_d.key)
        await p.tokens(on_p.key, token(3), cached=21)
        await idle()
        await workers["d1"].tokens(on_d.key, token(3), token(4), token(5, LENGTH))
        assert await call.end() == [1, 2, 3, 4, 5]
        assert call.outputs[-1].cached_tokens == 16  # what the request cached for itself does not count


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


@virtual
async def test_a_failed_attempt_frees_everything_though_nobody_reads() -> None:
    async with rig(*PAIR) as (router, workers):
        p, d = workers["p0"], workers["d0"]
        generator = router.service.generate(request())
        reading = asyncio.ensure_future(anext(generator))
        key = (await d.submits.get()).key
        await d.reserved(key)
        await p.tokens(key, token(1))
        await reading  # and then the client reads no more
        await d.failed(key, PeerSilent("prefill said nothing"))
        await idle()
        assert p.cancels.get_nowait().key == key
        assert [view.placed for view in router.service.workers()] == [0, 0]
        await generator.aclose()


@virtual
async def test_room_that_a_failed_attempt_leaves_is_its_own_first() -> None:
    async with rig(("p0", Role.PREFILL, {}), ("d0", Role.DECODE, {"slots": 1})) as (router, workers):
        d = workers["d0"]
        calls = [router.ask(request()) for _ in range(2)]
        key = (await d.submits.get()).key
        await d.failed(key, PeerSilent("prefill said nothing"))
        assert (await d.submits.get()).key == replace(key, attempt=2)
        for call in calls:
            await call.cancel()

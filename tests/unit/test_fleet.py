"""The fleet: which workers get a session, when it ends, readiness and scrapes."""

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from contracts.errors import NotReady
from contracts.requests import FinishReason
from contracts.session import Reserved, Tokens, WorkerEvent
from contracts.workers import Role
from router.sessions import ModelIdentity
from tests.helpers.router_rig import PAIR, FakeWorker, idle, request, rig, token, virtual


@virtual
async def test_a_lapsed_lease_leaves_the_session_alone() -> None:
    async with rig(*PAIR) as (router, workers):
        router.registry.remove("d0")
        await asyncio.sleep(10)
        assert router.service.ready()
        workers["d0"].kill()
        await asyncio.sleep(10)
        assert not router.service.ready()
        assert workers["d0"].sessions == 1


@virtual
async def test_a_worker_that_does_not_answer_yet_is_tried_again() -> None:
    async with rig(("p0", Role.PREFILL, {})) as (router, _):
        late = FakeWorker(router.network, "d0", Role.DECODE)
        router.registry.put(late.info)
        await asyncio.sleep(3)
        assert not router.service.ready()
        await late.serve()
        await router.service.wait_ready()
        await late.close()


@virtual
async def test_another_incarnation_at_the_address_is_not_taken() -> None:
    async with rig(("p0", Role.PREFILL, {})) as (router, _):
        worker = FakeWorker(router.network, "d0", Role.DECODE)
        await worker.serve()
        router.registry.put(replace(worker.info, incarnation=99))
        await asyncio.sleep(1)
        assert [view.worker.id for view in router.service.workers()] == ["p0"]
        router.registry.put(worker.info)
        await router.service.wait_ready()
        await worker.close()


@virtual
async def test_a_new_incarnation_takes_the_place_of_a_live_session() -> None:
    async with rig(*PAIR) as (router, workers):
        router.network.freeze("d0:1")
        successor = FakeWorker(router.network, "d0", Role.DECODE)
        successor.info = replace(successor.info, incarnation=2, address="d0:2")
        await successor.serve()
        router.registry.put(successor.info)
        await idle()
        assert [view.worker.incarnation for view in router.service.workers()] == [2, 1]
        call = router.ask(request())
        assert (await successor.submits.get()).incarnation == 2
        assert workers["d0"].submits.empty()
        await call.cancel()
        await successor.close()


@virtual
async def test_another_model_gets_no_session() -> None:
    async with rig(identity=ModelIdentity(model="other")) as (router, _):
        worker = FakeWorker(router.network, "d0", Role.DECODE)
        await router.start(worker)
        await asyncio.sleep(1)
        assert router.service.workers() == []
        assert worker.sessions > 1  # and it is tried again: the worker may be replaced at its address
        await worker.close()


@virtual
async def test_a_worker_that_says_it_is_stuck_is_not_ready() -> None:
    async with rig(*PAIR) as (router, workers):
        p = workers["p0"]
        await asyncio.sleep(100)
        assert router.service.ready()  # idle is ready
        p.load = replace(p.load, stuck=True)
        await p.say()
        await idle()
        assert not router.service.ready()
        p.load = replace(p.load, stuck=False)
        await router.service.wait_ready()


@virtual
async def test_a_fault_in_one_session_ends_that_session_only(caplog: pytest.LogCaptureFixture) -> None:
    async with rig(*PAIR, ("d1", Role.DECODE, {})) as (router, workers):
        d0, d1 = workers["d0"], workers["d1"]
        calls = [router.ask(request()) for _ in range(2)]
        keys = [(await d.submits.get()).key for d in (d0, d1)]
        await d1.reserved(keys[1])
        await d0.say(cast(WorkerEvent, "no event at all"))
        again = (await d1.submits.get()).key
        assert again == replace(keys[0], attempt=2)
        for key in (again, keys[1]):
            await d1.say(Reserved(key), Tokens(key, (token(1, FinishReason.STOP),)))
        assert [await call.end() for call in calls] == [[1], [1]]
        await asyncio.sleep(1)
        assert (d0.sessions, d1.sessions) == (2, 1)  # it was opened again
        assert len(router.service.workers()) == 3
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "the session to decode worker d0 failed" in record.message


@virtual
async def test_a_broken_fleet_is_told_to_whoever_runs_the_router() -> None:
    async with rig(*PAIR) as (router, workers):
        call = router.ask(request())
        await workers["d0"].submits.get()
        router.registry.fail(ZeroDivisionError())
        for told in (router.service.ended, router.service.stop):
            with pytest.raises(ExceptionGroup) as broken:
                await told()
            assert isinstance(broken.value.exceptions[0], ZeroDivisionError)
        assert not router.service.ready()
        with pytest.raises(NotReady):
            await call.end()


@virtual
async def test_ended_returns_after_a_stop() -> None:
    async with rig(*PAIR) as (router, _), asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(router.service.ended())
        await idle()
        assert not ended.done()
        await router.service.stop()
        await ended


@virtual
async def test_scrape_joins_all_that_answer() -> None:
    async with rig(*PAIR) as (router, _):
        router.network.freeze("d0:1")
        asked_at = asyncio.get_running_loop().time()
        text = await router.service.scrape()
        assert 'own{role="router",worker="router-0"} 1' in text
        assert 'up{role="prefill",worker="p0"} 1' in text
        assert 'worker="d0"' not in text
        assert asyncio.get_running_loop().time() - asked_at == pytest.approx(0.3)
        assert router.observed.workers() == {"decode": 1, "prefill": 1}


@virtual
async def test_a_worker_that_was_not_heard_for_two_seconds_is_not_ready() -> None:
    async with rig(*PAIR) as (router, _):
        router.network.freeze("p0:1")
        await asyncio.sleep(2.6)
        assert not router.service.ready()
        router.network.thaw("p0:1")
        await router.service.wait_ready()
        assert len(router.service.workers()) == 2  # its session was never given up

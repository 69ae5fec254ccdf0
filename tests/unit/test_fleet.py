"""The fleet: which workers get a session, when it ends, readiness and scrapes."""

import asyncio
from dataclasses import replace

import pytest

from contracts.workers import Role, WorkerLoad
from router.sessions import ModelIdentity
from tests.helpers.router_rig import PAIR, FakeWorker, idle, request, rig, virtual


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
async def test_a_worker_that_holds_work_and_stands_still_is_not_ready() -> None:
    async with rig(*PAIR) as (router, workers):
        await asyncio.sleep(100)
        assert router.service.ready()  # idle is ready
        call = router.ask(request(timeout=600))
        await asyncio.sleep(29)
        assert router.service.ready()
        await asyncio.sleep(2)
        assert not router.service.ready()
        for worker in workers.values():
            worker.load = WorkerLoad(60, 7, 0, 1, 0)
        await asyncio.sleep(1)
        assert router.service.ready()
        await call.cancel()


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

"""Faults inside one attempt stay inside it: the worker and its other attempts go on, and nothing leaks."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from cluster.local import LocalCluster
from contracts.errors import PdserveError
from contracts.handover import Fetch, Pull
from decode_workers.worker import DecodeRole
from engine.runners.base import StepPlan, StepResult
from kv_transfer.orders import Order
from kv_transfer.peer import OpenInlet
from simulator.virtual_time import run
from tests.helpers.simulated_cluster import collect, request, settle, simulated_cluster, simulated_config
from tests.helpers.simulated_engine import SimulatedEngine, key


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1000), k=length))


def decode_role(cluster: LocalCluster) -> DecodeRole:
    role = cluster.workers["decode-0"]._role
    assert isinstance(role, DecodeRole)
    return role


def test_kv_of_a_request_whose_logits_are_not_finite_is_found_by_nobody() -> None:
    async def main() -> None:
        engine = SimulatedEngine(step_tokens=8)
        compute = engine.runner.run

        async def overflow(plan: StepPlan) -> StepResult:
            result = await compute(plan)
            drawn = tuple(one and replace(one, finite=False) for one in result.drawn)
            return StepResult(drawn, result.times)

        engine.runner.run = overflow  # type: ignore[method-assign]  # the fault
        engine.loop.add(engine.sequence("a", prompt(16)))
        await engine.run_until_idle()
        assert key("a") in engine.errors
        assert engine.blocks.match(engine.sequence("b", prompt(16)).hashes(16)) == []
        engine.blocks.check()

    run(main())


def test_a_pull_that_starts_behind_the_last_block_ends_its_attempt_only() -> None:
    async def main() -> None:
        async with simulated_cluster(simulated_config()) as cluster:
            receiver = decode_role(cluster)._hand_over.receiver
            ask = receiver._pull

            def too_far(order: Order, opened: OpenInlet) -> Pull | Fetch:
                pull = ask(order, opened)
                assert isinstance(pull, Pull)
                return replace(pull, first_block=999)

            receiver._pull = too_far  # type: ignore[method-assign]  # the fault
            with pytest.raises(PdserveError):
                await collect(cluster, request(prompt(40)))
            receiver._pull = ask  # type: ignore[method-assign]
            await collect(cluster, request(prompt(40, seed=2)))

    run(main())


def test_a_bug_in_one_hand_over_ends_its_attempt_only() -> None:
    async def main() -> None:
        async with simulated_cluster(simulated_config()) as cluster:
            other = asyncio.create_task(collect(cluster, request(prompt(8), max_tokens=200)))
            await asyncio.sleep(0.05)
            transport: Any = decode_role(cluster)._hand_over._transports["memory"]
            end = transport._ends
            accept = end.accept
            end.accept = lambda *_: 1 / 0  # the fault
            with pytest.raises(PdserveError):
                await collect(cluster, request(prompt(40)))
            end.accept = accept
            await collect(cluster, request(prompt(40)))
            assert len(await other) == 200

    run(main())


@pytest.mark.parametrize("end", ["finished", "failed step", "cancelled", "deadline"])
def test_a_drain_ends_with_the_last_attempt_however_it_ends(end: str) -> None:
    async def main() -> None:
        async with simulated_cluster(simulated_config()) as cluster:
            host = cluster.workers.pop("decode-0")
            role = host._role
            assert isinstance(role, DecodeRole)
            wanted = request(prompt(8), max_tokens=60)
            if end == "deadline":
                wanted = replace(wanted, timeout=0.08)
            running = asyncio.create_task(collect(cluster, wanted))
            await asyncio.sleep(0.05)
            assert role.busy
            stopping = asyncio.create_task(host.stop(60.0))
            await asyncio.sleep(0.001)
            if end == "failed step":

                async def fail(plan: StepPlan) -> StepResult:
                    raise MemoryError

                host.core.runner.run = fail  # type: ignore[method-assign]  # the fault
            if end == "cancelled":
                running.cancel()
            began = asyncio.get_running_loop().time()
            await asyncio.wait({running})
            await stopping
            assert asyncio.get_running_loop().time() - began < 1.0
            assert not host.core.blocks.holders()
            if end == "finished":
                assert running.exception() is None

    run(main())


def test_requests_within_their_growth_reserve_are_never_preempted() -> None:
    """One long request and many short ones in a pool that is too small for all."""

    async def main() -> None:
        async with simulated_cluster(simulated_config(blocks=24)) as cluster:
            scheduler = cluster.workers["decode-0"].core.scheduler
            preempted: list[int] = []
            preempt = scheduler._preempt

            def note(sequence: Any) -> None:
                preempted.append(sequence.sampling.max_tokens)
                preempt(sequence)

            scheduler._preempt = note  # type: ignore[method-assign]  # watched
            async with asyncio.TaskGroup() as tasks:
                for number in range(2):
                    tasks.create_task(collect(cluster, request(prompt(8, seed=number), max_tokens=80)))
                for number in range(30):
                    await asyncio.sleep(0.004)
                    tasks.create_task(collect(cluster, request(prompt(8, seed=number), max_tokens=8)))
            assert preempted
            assert set(preempted) == {80}

    run(main())


def test_a_second_submit_of_an_attempt_that_is_ending_is_ignored() -> None:
    async def main() -> None:
        async with simulated_cluster(simulated_config()) as cluster:
            role = decode_role(cluster)
            submits: list[tuple[Any, Any]] = []
            submit = role.submit

            def note(message: Any, emit: Any) -> None:
                submits.append((message, emit))
                submit(message, emit)

            role.submit = note  # type: ignore[method-assign]  # watched
            end: Any = role._hand_over._transports["memory"]
            end = end._ends

            async def lingering(*_: Any) -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.2)

            end.accept = lingering  # a copy engine that needs a while to stop
            running = asyncio.create_task(collect(cluster, request(prompt(200))))
            await asyncio.sleep(0.006)
            running.cancel()
            await asyncio.wait({running})
            await asyncio.sleep(0.01)
            assert role.busy
            submit(*submits[0])
            await settle()
            assert not role.busy

    run(main())


def test_what_a_prefill_worker_hands_over_counts_as_that() -> None:
    async def main() -> None:
        async with simulated_cluster(simulated_config()) as cluster:
            for seed in range(5):
                await collect(cluster, request(prompt(20, seed)))
            leaving = asyncio.create_task(collect(cluster, request(prompt(200))))
            await asyncio.sleep(0.005)
            leaving.cancel()
            await asyncio.wait({leaving})
            await settle()
            counts = {
                line.split('outcome="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
                for line in (await cluster.router.scrape()).splitlines()
                if line.startswith("pdserve_requests_finished_total") and 'role="prefill"' in line
            }
            assert {outcome: count for outcome, count in counts.items() if count} == {"handed_over": 5, "cancelled": 1}

    run(main())

"""A session that ends takes along what was asked over it, and only that."""

import asyncio
import random

from contracts.errors import NotReady
from contracts.requests import Token
from simulator.fault_plan import Fault, FaultPlan
from simulator.fault_points import Action, Moment, Place, Point
from simulator.virtual_time import run
from tests.helpers.faulted_cluster import FaultedCluster, faulted_cluster
from tests.helpers.simulated_cluster import collect, request, simulated_cluster, simulated_config

PROMPT = tuple(random.Random(1).choices(range(1000), k=30))
OTHER = tuple(random.Random(2).choices(range(1000), k=30))


async def ask(cluster: FaultedCluster, prompt: tuple[int, ...], *, max_tokens: int) -> list[Token]:
    tokens: list[Token] = []
    async for output in cluster.generate("router-0", request(prompt, max_tokens=max_tokens), lambda: None):
        tokens.extend(output.tokens)
    return tokens


def test_a_killed_router_leaves_nothing_on_the_workers() -> None:
    async def main() -> None:
        async with faulted_cluster(simulated_config(step_tokens=16), FaultPlan([])) as cluster:
            calls = [asyncio.create_task(ask(cluster, PROMPT[n:], max_tokens=200)) for n in range(6)]
            await asyncio.sleep(0.02)
            assert all(host.core.blocks.holders() for host in cluster.local.workers.values())
            cluster.kill("router-0", 1.0)
            await asyncio.sleep(2 * (0.002 + 0.0001 * 16))  # two steps
            assert not any(host.core.blocks.holders() for host in cluster.local.workers.values())
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(end, NotReady) for end in ends)
            await cluster.restored()
            await cluster.routers["router-0"].service.wait_ready()
            assert len(await ask(cluster, PROMPT, max_tokens=20)) == 20

    run(main())


def test_a_prefill_worker_that_loses_its_session_during_a_hand_over_ends_the_attempt_and_not_the_request() -> None:
    """The first token is with the client, the last message of the hand-over is late, and then another request's first
    token breaks the session."""

    async def main() -> None:
        async with simulated_cluster(simulated_config(aggregated=True)) as undisturbed:
            expected = [await collect(undisturbed, request(prompt, max_tokens=20)) for prompt in (PROMPT, OTHER)]
        plan = FaultPlan(
            [
                Fault(Place(Point.LAST, Moment.BEFORE), 1, Action.DELAY, 0.5),
                Fault(Place(Point.FIRST_TOKEN, Moment.BEFORE), 2, Action.CUT),
            ]
        )
        async with faulted_cluster(simulated_config(), plan) as cluster:
            plan.armed = True
            calls = [asyncio.create_task(ask(cluster, prompt, max_tokens=20)) for prompt in (PROMPT, OTHER)]
            assert await asyncio.gather(*calls) == expected
            assert len(plan.fired) == 2

    run(main())

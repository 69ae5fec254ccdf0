"""Cancels, kills and freezes in virtual time: nothing leaks, and the tokens stay those of the undisturbed run.

Every test ends in the audit of tests/helpers/simulated_cluster.py.
"""

import asyncio
import random

import pytest

from cluster.local import LocalCluster
from contracts.errors import NotReady, PdserveError, WorkerLost
from contracts.requests import GenerateRequest, Token
from contracts.workers import Role
from simulator.virtual_time import run
from tests.helpers.simulated_cluster import collect, request, simulated_cluster, simulated_config

LONG = tuple(random.Random(1).choices(range(1000), k=200))
SHORT = tuple(random.Random(2).choices(range(1000), k=9))


async def undisturbed(wanted: GenerateRequest) -> list[Token]:
    """The tokens of a request on an aggregated worker that has nothing else to do."""
    async with simulated_cluster(simulated_config(aggregated=True)) as cluster:
        return await collect(cluster, wanted)


async def kill(cluster: LocalCluster, worker_id: str) -> None:
    """Cut the worker off at once, then let its tasks end."""
    host = cluster.workers.pop(worker_id)
    cluster.network.kill(host.core.info.address)
    await host.stop(0.0)


async def failures(cluster: LocalCluster) -> str:
    """The router's counts of failed attempts that are not 0."""
    lines = (await cluster.router.scrape()).splitlines()
    return "\n".join(
        line for line in lines if line.startswith("pdserve_attempt_failures_total") and not line.endswith(" 0.0")
    )


async def leave_after(cluster: LocalCluster, wanted: GenerateRequest, seconds: float) -> None:
    """A client that goes away."""
    try:
        async with asyncio.timeout(seconds):
            await collect(cluster, wanted)
    except TimeoutError:
        pass


@pytest.mark.parametrize("topology", [{}, {"aggregated": True}, {"prefill": 2, "decode": 2}])
def test_200_requests_with_random_cancels_leave_nothing(topology: dict[str, int]) -> None:
    async def main() -> None:
        dice = random.Random(3)
        async with simulated_cluster(simulated_config(**topology)) as cluster:  # type: ignore[arg-type]  # ints and bools
            wanted = [
                request(tuple(dice.choices(range(1000), k=dice.randint(1, 120))), max_tokens=dice.randint(1, 40))
                for _ in range(200)
            ]
            async with asyncio.TaskGroup() as tasks:
                for one in wanted:
                    tasks.create_task(leave_after(cluster, one, dice.choice([0.0, 0.001, 0.01, 0.05, 0.2, 1.0, 60.0])))
                    await asyncio.sleep(dice.choice([0.0, 0.0, 0.005, 0.02]))
            assert await collect(cluster, request(SHORT)) == await undisturbed(request(SHORT))

    run(main())


@pytest.mark.parametrize("step", range(24))
def test_a_cancel_at_any_moment_gives_everything_back_within_two_steps(step: int) -> None:
    """From the moment of the cancel, both workers are idle after two steps (a message and a step)."""

    async def main() -> None:
        async with simulated_cluster(simulated_config(step_tokens=16)) as cluster:
            await leave_after(cluster, request(LONG, max_tokens=30), 0.002 * step + 0.0001)
            await asyncio.sleep(2 * (0.002 + 0.0001 * 16))
            for host in cluster.workers.values():
                assert not host.core.blocks.holders()

    run(main())


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("moment", [0.0, 0.003, 0.01, 0.02, 0.05, 0.08])
def test_a_killed_worker_is_replaced_by_another_and_no_token_differs(role: str, moment: float) -> None:
    async def main() -> None:
        wanted = [request(LONG, max_tokens=30), request(SHORT, max_tokens=60), request(LONG[:50], max_tokens=40)]
        expected = [await undisturbed(one) for one in wanted]
        async with simulated_cluster(simulated_config(prefill=2, decode=2)) as cluster:
            running = [asyncio.create_task(collect(cluster, one)) for one in wanted]
            await asyncio.sleep(moment)
            await kill(cluster, f"{role}-0")
            assert [await task for task in running] == expected
            if moment in (0.003, 0.01, 0.02):  # before and after these the worker has nothing of theirs
                assert "pdserve_attempt_failures_total" in await failures(cluster)

    run(main())


def test_without_a_spare_the_request_ends_with_an_error_in_time() -> None:
    async def main() -> None:
        async with simulated_cluster(simulated_config()) as cluster:
            running = asyncio.create_task(collect(cluster, request(SHORT, max_tokens=400)))
            await asyncio.sleep(0.1)
            clock = asyncio.get_running_loop().time
            began = clock()
            await kill(cluster, "decode-0")
            with pytest.raises((WorkerLost, NotReady)):
                await running
            assert clock() - began < 5
            with pytest.raises(NotReady):
                await collect(cluster, request(SHORT))

    run(main())


def test_a_restarted_worker_serves_again() -> None:
    async def main() -> None:
        expected = await undisturbed(request(SHORT))
        async with simulated_cluster(simulated_config()) as cluster:
            assert await collect(cluster, request(SHORT)) == expected
            for role in (Role.DECODE, Role.PREFILL):
                await kill(cluster, f"{role.value}-0")
                await cluster.start_worker(role, f"{role.value}-0")
                await asyncio.sleep(5)
                assert await collect(cluster, request(SHORT)) == expected

    run(main())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_frozen_worker_is_left_and_its_late_tokens_are_dropped(role: str) -> None:
    async def main() -> None:
        wanted = [request(LONG, max_tokens=60, seed=n) for n in range(4)]
        expected = [await undisturbed(one) for one in wanted]
        async with simulated_cluster(simulated_config(prefill=2, decode=2)) as cluster:
            running = [asyncio.create_task(collect(cluster, one)) for one in wanted]
            await asyncio.sleep(0.03)
            address = cluster.workers[f"{role}-0"].core.info.address
            cluster.network.freeze(address)
            assert [await task for task in running] == expected
            cluster.network.thaw(address)

    run(main())


def test_an_engine_error_fails_the_request_and_not_the_worker() -> None:
    async def main() -> None:
        async with simulated_cluster(simulated_config()) as cluster:
            runner = cluster.workers["decode-0"].core.runner
            original = runner.run

            async def failing(plan: object) -> object:
                raise MemoryError("no memory for this step")

            runner.run = failing  # type: ignore[method-assign,assignment]  # the fault
            with pytest.raises(PdserveError, match="engine failed"):
                await collect(cluster, request(SHORT))
            runner.run = original  # type: ignore[method-assign]
            assert await collect(cluster, request(SHORT)) == await undisturbed(request(SHORT))

    run(main())


def test_a_lease_that_ends_while_decode_is_frozen_frees_prefill() -> None:
    async def main() -> None:
        async with simulated_cluster(simulated_config(prefill=1, decode=2)) as cluster:
            host = cluster.workers["prefill-0"]
            addresses = [cluster.workers[f"decode-{n}"].core.info.address for n in range(2)]
            for address in addresses:
                cluster.network.freeze(address)
            running = asyncio.create_task(collect(cluster, request(LONG)))
            await asyncio.sleep(40)
            assert not host.core.blocks.holders()
            for address in addresses:
                cluster.network.thaw(address)
            with pytest.raises(PdserveError):
                await running

    run(main())

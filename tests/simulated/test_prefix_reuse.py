"""A retry's prefill worker fetches the prompt's KV from whoever computed it before, and its tokens stay the same."""

import asyncio
import random

import pytest

from cluster.local import LocalCluster
from contracts.requests import Token
from simulator.virtual_time import run
from tests.helpers.simulated_cluster import collect, request, simulated_cluster, simulated_config

PROMPT = tuple(random.Random(5).choices(range(1000), k=101))
OTHER = tuple(random.Random(6).choices(range(1000), k=400))
WANTED = request(PROMPT, max_tokens=60)


async def kill(cluster: LocalCluster, worker_id: str) -> None:
    host = cluster.workers.pop(worker_id)
    cluster.network.kill(host.core.info.address)
    await host.stop(0.0)


def figure(cluster: LocalCluster, worker_id: str, name: str) -> float:
    text = cluster.workers[worker_id].core.figures.exposition()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


async def undisturbed() -> list[Token]:
    async with simulated_cluster(simulated_config(aggregated=True)) as cluster:
        return await collect(cluster, WANTED)


async def decoding(cluster: LocalCluster) -> str:
    """Waits until the request decodes; where."""
    while True:
        await asyncio.sleep(0.001)
        for worker_id in ("decode-0", "decode-1"):
            if figure(cluster, worker_id, "pdserve_generated_tokens_total") > 10:
                return worker_id


@pytest.mark.parametrize("holder_lives", [True, False])
def test_a_retry_on_another_prefill_worker(holder_lives: bool) -> None:
    """The decode worker dies while the prefill worker that has the prompt is busy, so the other one is chosen."""

    async def main() -> None:
        expected = await undisturbed()
        async with simulated_cluster(simulated_config(prefill=2, decode=2)) as cluster:
            answer = asyncio.create_task(collect(cluster, WANTED))
            lost = await decoding(cluster)
            busy = asyncio.create_task(collect(cluster, request(OTHER, max_tokens=1)))
            await asyncio.sleep(0.008)
            assert figure(cluster, "prefill-0", "pdserve_prefill_tokens_total") > len(PROMPT)
            if not holder_lives:
                await kill(cluster, "prefill-0")
            await kill(cluster, lost)
            assert await answer == expected
            await busy
            fetched = figure(cluster, "prefill-1", "pdserve_kv_transfer_blocks_total")
            cached = figure(cluster, "prefill-1", "pdserve_cached_tokens_total")
            # 25 full blocks of four tokens; what was generated since is computed
            assert (fetched, cached) == ((25, 100) if holder_lives else (0, 0))

    run(main())


def test_a_prefix_that_does_not_come_is_computed() -> None:
    """The holder stands still in the middle of the fetch."""

    async def main() -> None:
        expected = await undisturbed()
        async with simulated_cluster(simulated_config(prefill=2, decode=2)) as cluster:
            answer = asyncio.create_task(collect(cluster, WANTED))
            lost = await decoding(cluster)
            busy = asyncio.create_task(collect(cluster, request(OTHER, max_tokens=1)))
            await asyncio.sleep(0.008)
            address = cluster.workers["prefill-0"].core.info.address
            await kill(cluster, lost)
            cluster.network.freeze(address)
            assert await answer == expected
            cluster.network.thaw(address)
            await busy
            assert figure(cluster, "prefill-1", "pdserve_transfer_failures_total") == 1

    run(main())


def test_a_cancel_during_the_fetch_leaves_nothing() -> None:
    async def main() -> None:
        async with simulated_cluster(simulated_config(prefill=2, decode=2)) as cluster:
            answer = asyncio.create_task(collect(cluster, WANTED))
            lost = await decoding(cluster)
            busy = asyncio.create_task(collect(cluster, request(OTHER, max_tokens=1)))
            await asyncio.sleep(0.008)
            address = cluster.workers["prefill-0"].core.info.address
            cluster.network.freeze(address)
            await kill(cluster, lost)
            await asyncio.sleep(0.5)
            assert cluster.workers["prefill-1"].core.blocks.counts().reserved >= 25
            answer.cancel()
            await asyncio.sleep(1.1)  # the fetch says goodbye to a worker that does not hear it
            assert cluster.workers["prefill-1"].core.blocks.counts().reserved == 0
            cluster.network.thaw(address)
            await busy

    run(main())

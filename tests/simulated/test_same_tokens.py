"""The tokens depend on the request alone, whatever the topology, the cache and the neighbours."""

import asyncio
import random
from dataclasses import replace

import pytest

from contracts.requests import Token
from simulator.virtual_time import run
from tests.helpers.simulated_cluster import collect, request, simulated_cluster, simulated_config

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 60, 100]
PROMPTS = [tuple(random.Random(length).choices(range(1000), k=length)) for length in LENGTHS]
TOPOLOGIES = {
    "aggregated": simulated_config(aggregated=True),
    "1P+1D": simulated_config(),
    "2P+2D": simulated_config(prefill=2, decode=2),
}


async def _expected() -> list[list[Token]]:
    async with simulated_cluster(simulated_config(aggregated=True, step_tokens=512)) as cluster:
        return [await collect(cluster, request(prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("step_tokens", [7, 64, 512])
def test_tokens_are_those_of_an_undisturbed_worker(topology: str, step_tokens: int) -> None:
    async def main() -> None:
        expected = await _expected()
        config = TOPOLOGIES[topology]
        config = replace(config, engine=replace(config.engine, step_tokens=step_tokens))
        async with simulated_cluster(config) as cluster:
            for _ in ("cold", "warm"):
                for prompt, tokens in zip(PROMPTS, expected, strict=True):
                    assert await collect(cluster, request(prompt)) == tokens
            together = await asyncio.gather(*(collect(cluster, request(prompt)) for prompt in PROMPTS))
            assert together == expected

    run(main())


def test_sampling_depends_on_the_seed_alone() -> None:
    async def main() -> None:
        async with simulated_cluster(TOPOLOGIES["2P+2D"]) as cluster:
            prompt = PROMPTS[-1]
            first = await collect(cluster, request(prompt, seed=7, temperature=1.0))
            again = await asyncio.gather(
                *(collect(cluster, request(prompt, seed=7, temperature=1.0)) for _ in range(3))
            )
            assert all(tokens == first for tokens in again)
            assert await collect(cluster, request(prompt, seed=8, temperature=1.0)) != first

    run(main())


def test_preemption_on_decode_changes_nothing() -> None:
    async def main() -> None:
        wanted = [request(PROMPTS[index], max_tokens=80) for index in range(8)]
        async with simulated_cluster(simulated_config(blocks=512)) as cluster:
            expected = await asyncio.gather(*(collect(cluster, one) for one in wanted))
        async with simulated_cluster(simulated_config(blocks=60)) as cluster:
            assert await asyncio.gather(*(collect(cluster, one) for one in wanted)) == expected
            lines = (await cluster.router.scrape()).splitlines()
        counts = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("pdserve_preemptions_total{")]
        assert sum(counts) >= 2

    run(main())

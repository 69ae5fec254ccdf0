"""Seeds: none gives new answers each time, the same one the same answer, whoever computes it and beside whom."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.answers import WAYS, ask, settled
from tests.helpers.checkpoints import greedy_prompts
from tests.helpers.model_cluster import Served, model_config, served_cluster

PROMPT = greedy_prompts()[8]
FIELDS: dict[str, Any] = {"max_tokens": 16, "temperature": 1, "ignore_eos": True}


async def say(served: Served, way: str, **fields: Any) -> str:
    return (await ask(served, way, PROMPT, **FIELDS | fields)).text


async def busy(served: Served) -> None:
    """Neighbours in every batch."""
    await asyncio.gather(*(ask(served, "grpc", p, **FIELDS | {"max_tokens": 40}) for p in greedy_prompts()))


async def test_without_a_seed_answers_differ(noise_llama: Path) -> None:
    async with served_cluster(model_config(noise_llama)) as served:
        for way in WAYS:
            assert len({await say(served, way) for _ in range(5)}) == 5
        firsts = {await say(served, "whole", max_tokens=1) for _ in range(20)}
        assert len(firsts) > 1  # also the token that prefill draws
        await settled(served)


@pytest.mark.parametrize(
    "topology", [{}, {"transport": "grpc", "step_tokens": 7}, {"prefill": 2, "decode": 2}, {"aggregated": True}]
)
async def test_the_same_seed_gives_the_same_answer(topology: dict[str, Any], noise_llama: Path) -> None:
    async with served_cluster(model_config(noise_llama, aggregated=True)) as served:
        expected = {seed: await say(served, "whole", seed=seed) for seed in (7, 8, 2**63 - 1)}
    assert len(set(expected.values())) == 3
    async with served_cluster(model_config(noise_llama, **topology)) as served:
        for way in WAYS:
            assert {await say(served, way, seed=7) for _ in range(5)} == {expected[7]}
        neighbours = asyncio.create_task(busy(served))
        seeds = list(expected) * 4
        found = await asyncio.gather(*(say(served, WAYS[n % 3], seed=seed) for n, seed in enumerate(seeds)))
        await neighbours
        assert found == [expected[seed] for seed in seeds]
        metrics = await settled(served)
        if "prefill" in topology:  # all of them took part
            for worker in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
                assert metrics("pdserve_generated_tokens_total", worker=worker) > 0

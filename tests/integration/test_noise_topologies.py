"""noise-llama on every topology and transport: the tokens of the aggregated worker, logprobs within 1e-5.

Any lost, shifted or overwritten KV changes its logprobs.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from contracts.requests import Token
from tests.helpers.checkpoints import greedy_prompts, make_noise_llama
from tests.helpers.model_cluster import greedy, model_cluster, model_config
from tests.helpers.simulated_cluster import collect

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "aggregated": {"aggregated": True},
    "1P+1D memory": {},
    "1P+1D grpc": {"transport": "grpc"},
    "2P+2D memory": {"prefill": 2, "decode": 2},
    "2P+2D grpc": {"prefill": 2, "decode": 2, "transport": "grpc"},
}
BLOCK = 16
LENGTHS = [k * BLOCK + d for k in (1, 2, 3, 4) for d in (-1, 0, 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("noise")
    make_noise_llama(directory)
    return directory


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Those that are far from ties, cut or repeated to the lengths round the block size."""
    base = greedy_prompts()
    return [*base, *((base[index % len(base)] * 80)[:length] for index, length in enumerate(LENGTHS))]


async def answers(model: Path, prompts: list[list[int]], new_tokens: int, **topology: Any) -> list[list[Token]]:
    """Each prompt by itself, on a cold cache."""
    async with model_cluster(model_config(model, **topology)) as cluster:
        return [await collect(cluster, greedy(prompt, new_tokens, logprobs=0)) for prompt in prompts]


def assert_same(found: list[Token], expected: list[Token]) -> None:
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    assert [token.text for token in found] == [token.text for token in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[Token]]:
    return asyncio.run(answers(model, prompts, 24, aggregated=True))


@pytest.mark.parametrize("step_tokens", [7, 16, 64, 512])
@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_same_tokens(
    topology: str, step_tokens: int, model: Path, prompts: list[list[int]], expected: list[list[Token]]
) -> None:
    config = model_config(model, step_tokens=step_tokens, **TOPOLOGIES[topology])
    async with model_cluster(config) as cluster:
        for _ in ("cold", "warm"):
            for prompt, tokens in zip(prompts, expected, strict=True):
                assert_same(await collect(cluster, greedy(prompt, 24, logprobs=0)), tokens)
        together = await asyncio.gather(*(collect(cluster, greedy(prompt, 24, logprobs=0)) for prompt in prompts))
        for found, tokens in zip(together, expected, strict=True):
            assert_same(found, tokens)


@pytest.mark.parametrize("topology", ["aggregated", "1P+1D grpc"])
async def test_32_streams_at_once(
    topology: str, model: Path, prompts: list[list[int]], expected: list[list[Token]]
) -> None:
    async with model_cluster(model_config(model, **TOPOLOGIES[topology])) as cluster:
        wanted = [index % len(prompts) for index in range(32)]
        found = await asyncio.gather(*(collect(cluster, greedy(prompts[i], 24, logprobs=0)) for i in wanted))
        for tokens, index in zip(found, wanted, strict=True):
            assert_same(tokens, expected[index])


@pytest.mark.parametrize("topology", ["aggregated", "1P+1D memory"])
async def test_preemption_changes_nothing(
    topology: str, model: Path, prompts: list[list[int]], expected: list[list[Token]]
) -> None:
    """A pool of 12 blocks for four sequences of up to 7 blocks each: at least two preemptions."""
    wanted = prompts[-4:]
    large = await answers(model, wanted, 50, aggregated=True)
    config = model_config(model, blocks=12, **TOPOLOGIES[topology])
    async with model_cluster(config) as cluster:
        found = await asyncio.gather(*(collect(cluster, greedy(prompt, 50, logprobs=0)) for prompt in wanted))
        for tokens, other in zip(found, large, strict=True):
            assert_same(tokens, other)
        exposition = await cluster.router.scrape()
    preempted = [line for line in exposition.splitlines() if line.startswith("pdserve_preemptions_total")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in preempted) >= 2

"""Blocks on both sides of the hand-over: exactly those of the prompt, none twice, all given back."""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from contracts.kv import blocks_for
from contracts.workers import Role
from tests.helpers.answers import Answer, Metrics, ask, scrape, settled, until
from tests.helpers.checkpoints import greedy_prompts
from tests.helpers.model_cluster import Served, model_config, served_cluster
from tests.helpers.steps import Steps

BLOCK = 16
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 16 * 4  # layers, K and V, heads, tokens, dim, float32
PROMPT = (greedy_prompts()[-1] * 2)[: 4 * BLOCK + 1]
LENGTHS = [k * BLOCK + d for k in (1, 2, 3, 4) for d in (-1, 0, 1)]


def logprobs(answer: Answer) -> list[float]:
    return [token.logprob for response in answer.raw for token in response.tokens]


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.token_ids == expected.token_ids
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-5)


async def whole(served: Served, prompt: list[int]) -> Answer:
    return await ask(served, "grpc", prompt, max_tokens=4, temperature=0, logprobs=0)


@pytest.fixture
async def expected(noise_llama: Path) -> dict[int, Answer]:
    """By prompt length, on a cold aggregated worker each."""
    async with served_cluster(model_config(noise_llama, aggregated=True)) as served:
        return {length: await whole(served, PROMPT[:length]) for length in LENGTHS}


@pytest.mark.parametrize("transport", ["memory", "grpc"])
@pytest.mark.parametrize("length", LENGTHS)
async def test_blocks_of_a_prompt(length: int, transport: str, noise_llama: Path, expected: dict[int, Answer]) -> None:
    """Prefill pins and decode receives ceil(P / B) blocks, cold; warm, only those come that decode lacks."""
    prompt, blocks = PROMPT[:length], blocks_for(length, BLOCK)
    async with served_cluster(model_config(noise_llama, transport=transport)) as served:
        steps = Steps(served.cluster, "prefill-0", hold=0)
        answering = asyncio.create_task(whole(served, prompt))
        await steps.held.wait()
        held = await until(served, lambda found: found("pdserve_kv_blocks", role="decode", state="reserved") > 0)
        assert held("pdserve_kv_blocks", role="prefill", state="used") == blocks
        assert held("pdserve_leases", role="prefill") == 1
        # prompt and four tokens of which the last needs no KV
        assert held("pdserve_kv_blocks", role="decode", state="reserved") == blocks_for(length + 3, BLOCK)
        steps.open()
        assert_same(await answering, expected[length])
        cold = await settled(served)
        assert cold("pdserve_kv_transfer_blocks_total") == blocks
        assert cold("pdserve_kv_transfer_bytes_total", transport=transport) == blocks * BLOCK_BYTES
        for role in ("prefill", "decode"):
            free, cached = (cold("pdserve_kv_blocks", role=role, state=state) for state in ("free", "cached"))
            assert free + cached == 160
            assert cached == (length if role == "prefill" else length + 3) // BLOCK
        again = await whole(served, prompt)
        assert_same(again, expected[length])
        assert again.cached_tokens == (length - 1) // BLOCK * BLOCK
        warm = await settled(served)
        assert warm("pdserve_kv_transfer_blocks_total") - blocks == blocks - length // BLOCK


async def restarted(served: Served, worker_id: str) -> None:
    """A new incarnation with a cold cache."""
    await served.cluster.workers.pop(worker_id).stop(0.0)
    host = await served.cluster.start_worker(Role(worker_id.partition("-")[0]), worker_id)
    life = host.core.info.incarnation
    await until(served, lambda _: any(view.worker.incarnation == life for view in served.cluster.router.workers()))


def moved(metrics: Metrics) -> float:
    return metrics("pdserve_kv_transfer_blocks_total")


@pytest.mark.parametrize("transport", ["memory", "grpc"])
async def test_the_whole_prompt_is_cached(transport: str, noise_llama: Path, expected: dict[int, Answer]) -> None:
    """Four full blocks three times, then one token more. At least one token is always computed."""
    four, more = PROMPT[: 4 * BLOCK], PROMPT[: 4 * BLOCK + 1]
    async with served_cluster(model_config(noise_llama, transport=transport)) as served:
        computed = [0.0]
        for prompt, cached, comes in ((four, 0, 4), (four, 48, 0), (four, 48, 0), (more, 64, 1)):
            before = moved(await scrape(served))
            answer = await whole(served, prompt)
            assert_same(answer, expected[len(prompt)])
            assert answer.cached_tokens == cached < len(prompt)
            after = await settled(served)  # prefill's blocks are released also when nothing was sent
            assert moved(after) - before == comes
            computed.append(after("pdserve_prefill_tokens_total", role="prefill"))
        assert [after - before for before, after in pairwise(computed)] == [64, 16, 16, 1]
        assert after("pdserve_prefill_tokens_total", role="decode") == 0


@pytest.mark.parametrize("length", [4 * BLOCK, 4 * BLOCK + 1])
@pytest.mark.parametrize("cold", ["prefill-0", "decode-0"])
async def test_one_side_is_warm(cold: str, length: int, noise_llama: Path, expected: dict[int, Answer]) -> None:
    prompt, blocks = PROMPT[:length], blocks_for(length, BLOCK)
    async with served_cluster(model_config(noise_llama)) as served:
        await whole(served, prompt)
        await restarted(served, cold)
        before = await scrape(served)
        answer = await whole(served, prompt)
        assert_same(answer, expected[length])
        assert answer.cached_tokens == (0 if cold == "prefill-0" else 4 * BLOCK if length % BLOCK else 3 * BLOCK)
        after = await settled(served)
        came = moved(after) - moved(before)
        assert came == (blocks - length // BLOCK if cold == "prefill-0" else blocks)

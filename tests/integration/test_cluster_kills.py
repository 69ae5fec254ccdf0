"""Real processes that are killed or frozen: the same text, nobody restarts but the dead, nothing is kept."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helpers.answers import Metrics
from tests.helpers.processes import kill_and_wait
from tests.helpers.real_cluster import RealCluster, eventually
from tests.helpers.streams import Stream, streams
from tests.integration.conftest import NoiseCluster

pytestmark = pytest.mark.cluster

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
Body = dict[str, Any]
Told = dict[str, list[tuple[Body, str]]]


def body(prompt_tokens: int, tokens: int, seed: int) -> Body:
    draw = random.Random(seed)
    prompt = [draw.randrange(8, 512) for _ in range(prompt_tokens)]
    return {"model": "noise", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def told(noise_cluster: NoiseCluster) -> Told:
    """Requests with the text that each has when nothing breaks; no token of them is near a tie."""

    def ask(request: Body) -> str:
        answer = httpx.post(f"{noise_cluster.real.url}/v1/completions", json=request | {"logprobs": 2}, timeout=60)
        (choice,) = answer.json()["choices"]
        for best in choice["logprobs"]["top_logprobs"]:
            first, second, *_ = sorted((*best.values(), float("-inf")), reverse=True)
            assert first - second > 1e-4
        return str(choice["text"])

    requests = {
        "long answers": [body(40, 1800, seed) for seed in (3, 7, 9, 10, 11, 13, 15, 19)],
        "long prompts": [body(1500, 20, seed) for seed in range(100, 115)],
    }
    with ThreadPoolExecutor(16) as pool:
        return {kind: list(zip(some, pool.map(ask, some), strict=True)) for kind, some in requests.items()}


@pytest.fixture
async def cluster(noise_cluster: NoiseCluster) -> AsyncIterator[RealCluster]:
    """All workers answer and hold nothing, before and after."""
    await noise_cluster.real.idle(*WORKERS)
    yield noise_cluster.real
    await noise_cluster.real.idle(*WORKERS)


async def test_a_killed_decode_worker(cluster: RealCluster, told: Told) -> None:
    before, lost = await cluster.status(), await losses(cluster)
    async with cluster.client() as client:
        async with streams(client, bodies(told["long answers"])) as running:
            await asyncio.gather(*(stream.until(10) for stream in running))
            kill_and_wait(before["decode-1"]["pid"])
            async with asyncio.timeout(15):
                await probe(client, told)
            await eventually(cluster.metrics, lambda found: found.get("pdserve_leases", worker="decode-1") is None)
        assert_whole(running, told["long answers"])
        assert await losses(cluster) > lost
        await serves_again(cluster, client, "decode-1", before, told)


async def test_a_killed_prefill_worker(cluster: RealCluster, told: Told) -> None:
    before, lost = await cluster.status(), await losses(cluster)
    async with cluster.client() as client:
        async with streams(client, bodies(told["long answers"][:4])) as decoding:
            await asyncio.gather(*(stream.until(10) for stream in decoding))
            async with streams(client, bodies(told["long prompts"])) as prefilling:
                await eventually(cluster.metrics, lambda found: found("pdserve_leases", worker="prefill-0") > 0)
                kill_and_wait(before["prefill-0"]["pid"])
                async with asyncio.timeout(15):
                    await probe(client, told)
        assert_whole(decoding, told["long answers"][:4])
        assert_whole(prefilling, told["long prompts"])
        assert await losses(cluster) > lost
        await serves_again(cluster, client, "prefill-0", before, told)


async def test_a_frozen_decode_worker(cluster: RealCluster, told: Told) -> None:
    before, lost = await cluster.status(), await losses(cluster)
    async with cluster.client() as client:
        async with streams(client, bodies(told["long answers"])) as running:
            await asyncio.gather(*(stream.until(10) for stream in running))
            os.kill(before["decode-0"]["pid"], signal.SIGSTOP)
        try:
            assert_whole(running, told["long answers"])
            assert await losses(cluster) > lost
            await probe(client, told)
        finally:
            os.kill(before["decode-0"]["pid"], signal.SIGCONT)
        await served_by(cluster, client, "decode-0", told)
    assert (await cluster.status())["decode-0"] == before["decode-0"]


async def test_a_killed_router(cluster: RealCluster, told: Told) -> None:
    before = await cluster.status()
    async with cluster.client() as client:
        async with streams(client, bodies(told["long answers"])) as running:
            await asyncio.gather(*(stream.until(10) for stream in running))
            kill_and_wait(before["router-0"]["pid"])
        assert all(stream.error and not stream.finish for stream in running)
        await eventually(lambda: ready(client), bool)
        await probe(client, told)
    after = await eventually(cluster.status, lambda found: found.get("router-0") != before["router-0"])
    assert after["router-0"]["address"] == before["router-0"]["address"]
    assert {worker: after[worker] for worker in WORKERS} == {worker: before[worker] for worker in WORKERS}


def bodies(told: list[tuple[Body, str]]) -> list[Body]:
    return [request for request, _ in told]


def assert_whole(found: list[Stream], told: list[tuple[Body, str]]) -> None:
    assert [stream.error for stream in found] == [{}] * len(told)
    assert [stream.finish for stream in found] == ["length"] * len(told)
    assert [stream.text for stream in found] == [text for _, text in told]


async def probe(client: httpx.AsyncClient, told: Told) -> None:
    """A new request succeeds at once and is right."""
    request, text = told["long prompts"][0]
    answer = await client.post("/v1/completions", json=request)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text


async def losses(cluster: RealCluster) -> float:
    """Attempts that have ended with the loss of their worker."""
    return (await cluster.metrics()).get("pdserve_attempt_failures_total", code="worker_lost") or 0.0


async def serves_again(
    cluster: RealCluster, client: httpx.AsyncClient, worker: str, before: dict[str, Any], told: Told
) -> None:
    """The worker is back under its name as another incarnation; nothing else has changed."""
    after = await eventually(
        cluster.status, lambda found: worker in found and found[worker]["pid"] != before[worker]["pid"]
    )
    assert after[worker]["incarnation"] != before[worker]["incarnation"]
    assert {**after, worker: {}} == {**before, worker: {}}
    await served_by(cluster, client, worker, told)


async def served_by(cluster: RealCluster, client: httpx.AsyncClient, worker: str, told: Told) -> None:
    """Requests are placed on the worker, and are right."""

    def generated(found: Metrics) -> float:
        return found.get("pdserve_generated_tokens_total", worker=worker) or 0.0

    at_first = generated(
        await eventually(cluster.metrics, lambda found: found.get("pdserve_leases", worker=worker) == 0)
    )

    async def ask() -> Metrics:
        async with streams(client, bodies(told["long prompts"][:4])) as found:
            pass
        assert_whole(found, told["long prompts"][:4])
        return await cluster.metrics()

    await eventually(ask, lambda found: generated(found) > at_first)


async def ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False

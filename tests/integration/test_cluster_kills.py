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
Told = list[tuple[Body, str]]


def body(prompt_tokens: int, tokens: int, seed: int) -> Body:
    draw = random.Random(seed)
    prompt = [draw.randrange(8, 512) for _ in range(prompt_tokens)]
    return {"model": "noise", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def tell(url: str, requests: list[Body]) -> Told:
    """The requests with the text that each has while nothing breaks; no token of them may be near a tie."""

    def ask(request: Body) -> str:
        answer = httpx.post(f"{url}/v1/completions", json=request | {"logprobs": 2}, timeout=240)
        (choice,) = answer.json()["choices"]
        for best in choice["logprobs"]["top_logprobs"]:
            first, second, *_ = sorted((*best.values(), float("-inf")), reverse=True)
            assert first - second > 1e-4
        return str(choice["text"])

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(zip(requests, pool.map(ask, requests), strict=True))


@pytest.fixture(scope="module")
def told(noise_cluster: NoiseCluster) -> Told:
    """Many long answers, each asked for twice: there is time to break something."""
    return 2 * tell(noise_cluster.real.url, [body(40, 1800, seed) for seed in (3, 7, 9, 10, 11, 13, 15, 19)])


@pytest.fixture
async def cluster(noise_cluster: NoiseCluster) -> AsyncIterator[RealCluster]:
    """All workers answer and hold nothing, before and after."""
    await noise_cluster.real.idle(*WORKERS)
    yield noise_cluster.real
    await noise_cluster.real.idle(*WORKERS)


async def test_a_killed_decode_worker(cluster: RealCluster, told: Told) -> None:
    before, lost = await cluster.status(), await losses(cluster)
    async with cluster.client() as client:
        async with streams(client, bodies(told)) as running:
            await asyncio.gather(*(stream.until(3) for stream in running))
            kill_and_wait(before["decode-1"]["pid"])
            gone = eventually(cluster.metrics, lambda found: found.get("pdserve_leases", worker="decode-1") is None)
            async with asyncio.timeout(60):
                await asyncio.gather(probe(client, told), gone)  # on a busy machine it may be back before they end
        assert_whole(running, told)
        assert await losses(cluster) > lost
        await serves_again(cluster, client, "decode-1", before, told)


async def test_a_killed_prefill_worker(cluster: RealCluster, told: Told) -> None:
    before, lost = await cluster.status(), await losses(cluster)
    unheard = [body(1500, 20, seed) for seed in range(100, 115)]  # no cache holds these prompts
    crowd = [body(1500, 2, seed) for seed in range(200, 245)]  # keeps both prefill workers busy for seconds
    async with cluster.client() as client:
        async with streams(client, bodies(told[:4])) as decoding:
            await asyncio.gather(*(stream.until(3) for stream in decoding))
            async with streams(client, unheard + crowd) as prefilling:
                await eventually(cluster.metrics, lambda found: found("pdserve_leases", worker="prefill-0") > 0)
                kill_and_wait(before["prefill-0"]["pid"])
                async with asyncio.timeout(60):
                    await probe(client, told)
        assert_whole(decoding, told[:4])
        assert all(stream.finish == "length" for stream in prefilling)
        assert_whole(prefilling[: len(unheard)], await asyncio.to_thread(tell, cluster.url, unheard))
        assert await losses(cluster) > lost
        await serves_again(cluster, client, "prefill-0", before, told)


async def test_a_frozen_decode_worker(cluster: RealCluster, told: Told) -> None:
    before, lost = await cluster.status(), await losses(cluster)
    async with cluster.client() as client:
        async with streams(client, bodies(told)) as running:
            await asyncio.gather(*(stream.until(3) for stream in running))
            os.kill(before["decode-0"]["pid"], signal.SIGSTOP)
        try:
            assert_whole(running, told)
            assert await losses(cluster) > lost
            await probe(client, told)
        finally:
            os.kill(before["decode-0"]["pid"], signal.SIGCONT)
        await served_by(cluster, client, "decode-0", told)
    assert (await cluster.status())["decode-0"] == before["decode-0"]


async def test_a_killed_router(cluster: RealCluster, told: Told) -> None:
    before = await cluster.status()
    async with cluster.client() as client:
        async with streams(client, bodies(told)) as running:
            await asyncio.gather(*(stream.until(3) for stream in running))
            kill_and_wait(before["router-0"]["pid"])
        assert [stream.finish for stream in running] == [""] * len(told)
        assert all(stream.error for stream in running)
        await eventually(lambda: ready(client), bool)
        await probe(client, told)
    after = await eventually(cluster.status, lambda found: found.get("router-0") != before["router-0"])
    assert after["router-0"]["address"] == before["router-0"]["address"]
    assert {worker: after[worker] for worker in WORKERS} == {worker: before[worker] for worker in WORKERS}


def bodies(told: Told) -> list[Body]:
    return [request for request, _ in told]


def assert_whole(found: list[Stream], told: Told) -> None:
    assert [stream.error for stream in found] == [{}] * len(told)
    assert [stream.finish for stream in found] == ["length"] * len(told)
    assert [stream.text for stream in found] == [text for _, text in told]


async def probe(client: httpx.AsyncClient, told: Told) -> None:
    """New requests succeed at once and are right."""
    async with streams(client, [request | {"max_tokens": 20} for request in bodies(told[:4])]) as found:
        pass
    assert [(stream.status, stream.finish) for stream in found] == [(200, "length")] * 4, found[0].error
    assert all(text.startswith(stream.text) for stream, (_, text) in zip(found, told, strict=False))


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
        await probe(client, told)
        return await cluster.metrics()

    await eventually(ask, lambda found: generated(found) > at_first)


async def ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False

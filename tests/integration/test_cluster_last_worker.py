"""The only prefill or decode process of a real cluster is killed: an error at once, and service again soon."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.helpers.processes import kill_and_wait
from tests.helpers.real_cluster import RealCluster, eventually
from tests.helpers.streams import streams

pytestmark = [pytest.mark.cluster, pytest.mark.model]

LONG: dict[str, Any] = {
    "model": "smollm2-135m",
    "prompt": "Once upon a time",
    "max_tokens": 80,
    "temperature": 0,
    "ignore_eos": True,
}


async def test_the_decode_worker(smollm2_cluster: RealCluster) -> None:
    await smollm2_cluster.idle("prefill-0", "decode-0")
    pid = await smollm2_cluster.pid("decode-0")
    async with smollm2_cluster.client() as client:
        async with streams(client, [LONG] * 3) as running:
            await asyncio.gather(*(stream.until(3) for stream in running))
            kill_and_wait(pid)
            async with asyncio.timeout(20):
                refused = await client.post("/v1/completions", json=LONG)
                await asyncio.gather(*(stream.ended() for stream in running))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] in ("not_ready", "worker_lost")
        assert [stream.error["code"] for stream in running] == ["worker_lost"] * 3
        assert all(stream.status == 200 and stream.closed and not stream.finish for stream in running)
        await serves_again(client)
    await smollm2_cluster.idle("prefill-0", "decode-0")


async def test_the_prefill_worker(smollm2_cluster: RealCluster) -> None:
    await smollm2_cluster.idle("prefill-0", "decode-0")
    pid = await smollm2_cluster.pid("prefill-0")
    async with smollm2_cluster.client() as client:
        async with streams(client, [LONG]) as (alone,):
            pass
        async with streams(client, [LONG]) as (decoding,):
            await decoding.until(3)
            kill_and_wait(pid)
            async with asyncio.timeout(20):
                refused = await client.post("/v1/completions", json=LONG | {"prompt": "Another"})
            assert refused.status_code == 503
            assert not decoding.done
        assert (decoding.text, decoding.finish, decoding.error) == (alone.text, "length", {})
        await serves_again(client)
    await smollm2_cluster.idle("prefill-0", "decode-0")


async def serves_again(client: httpx.AsyncClient) -> None:
    async def ask() -> httpx.Response:
        return await client.post("/v1/completions", json=LONG | {"max_tokens": 4})

    await eventually(ask, lambda answer: answer.status_code == 200, 15.0, lambda answer: answer.text)

"""A Redis that freezes or forgets under a real cluster: nobody who is served notices."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.helpers.real_cluster import eventually
from tests.helpers.streams import streams
from tests.integration.conftest import NoiseCluster

pytestmark = pytest.mark.cluster

NODES = {"router-0", "prefill-0", "prefill-1", "decode-0", "decode-1"}
LONG: dict[str, Any] = {
    "model": "noise",
    "prompt": list(range(8, 72)),
    "max_tokens": 1900,
    "temperature": 0,
    "ignore_eos": True,
}


async def test_a_frozen_redis_stops_nobody(noise_cluster: NoiseCluster) -> None:
    real = noise_cluster.real
    async with real.client() as client:
        async with streams(client, [LONG] * 6) as running:
            await asyncio.gather(*(stream.until(10) for stream in running))
            noise_cluster.valkey.freeze()
        try:
            async with streams(client, [LONG] * 6) as begun_since:  # by their end, about every lease has lapsed
                pass
            found = running + begun_since
            assert [(stream.finish, stream.error) for stream in found] == [("length", {})] * 12
            assert len({stream.text for stream in found}) == 1
        finally:
            noise_cluster.valkey.thaw()
        await eventually(real.status, lambda found: set(found) == NODES)
        await probe(client)


async def test_workers_register_again_in_an_empty_redis(noise_cluster: NoiseCluster) -> None:
    real = noise_cluster.real
    before = await eventually(real.status, lambda found: set(found) == NODES)
    async with real.client() as client:
        noise_cluster.valkey.kill()
        try:
            await probe(client)
        finally:
            noise_cluster.valkey.start()
        assert await eventually(real.status, lambda found: set(found) == NODES) == before
        await probe(client)


async def probe(client: httpx.AsyncClient) -> None:
    """A new request succeeds."""
    answer = await client.post("/v1/completions", json=LONG | {"max_tokens": 5})
    assert answer.status_code == 200, answer.text

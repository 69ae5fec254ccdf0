"""Real worker processes over each transport: the same tokens, over the transport that was asked for."""

import asyncio
import random
from pathlib import Path

import pytest

from contracts.requests import GenerateRequest, Token
from tests.helpers.process_cluster import process_cluster, process_config
from tests.helpers.simulated_cluster import collect, request, simulated_cluster, simulated_config

WANTED = [request(tuple(random.Random(n).choices(range(1000), k=3 + 13 * n)), max_tokens=20) for n in range(8)]


async def undisturbed(wanted: list[GenerateRequest]) -> list[list[Token]]:
    """The tokens of one aggregated worker; here its time is real, and short."""
    async with simulated_cluster(simulated_config(aggregated=True), lambda plan: 0.0) as cluster:
        return [await collect(cluster, each) for each in wanted]


@pytest.mark.parametrize(
    ("transport", "used"), [("auto", "shared_memory"), ("tcp", "tcp"), ("nccl", "nccl"), ("grpc", "grpc")]
)
async def test_tokens_over(transport: str, used: str, tmp_path: Path) -> None:
    expected = await undisturbed(WANTED)
    async with process_cluster(process_config(prefill=2, decode=2, transport=transport), tmp_path) as cluster:
        assert await asyncio.gather(*(cluster.collect(each) for each in WANTED)) == expected
        figures = await cluster.idle()
        moved = {
            name.split('"')[1]
            for worker in figures.values()
            for name, value in worker.items()
            if name.startswith("pdserve_kv_transfer_bytes_total") and value
        }
        assert moved == {used}
        assert sum(worker["pdserve_prompt_tokens_recomputed_total"] for worker in figures.values()) == 0

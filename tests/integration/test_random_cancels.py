"""200 requests with random cancels over real sockets and the real engine: everything is back at the end."""

import asyncio
import random
from pathlib import Path

import pytest

from cluster.local import LocalCluster
from tests.helpers.checkpoints import make_noise_llama
from tests.helpers.model_cluster import greedy, model_cluster, model_config
from tests.helpers.simulated_cluster import collect

REQUESTS = 200


async def leave_at_position(cluster: LocalCluster, prompt: list[int], position: int) -> int:
    """Read until a token of this position (0: none), then go; how many were read."""
    read = 0
    answer = cluster.generate(greedy(prompt, 40))
    if position == 0:
        first = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
    else:
        async for output in answer:
            read = output.tokens[-1].position
            if read >= position:
                break
    await answer.aclose()
    return read


@pytest.mark.parametrize("topology", [{"decode": 2}, {"prefill": 2}, {"aggregated": True}])
async def test_nothing_stays_behind(topology: dict[str, int], tmp_path: Path) -> None:
    make_noise_llama(tmp_path)
    dice = random.Random(5)
    prompts = [[dice.randrange(300, 500) for _ in range(dice.randint(1, 300))] for _ in range(REQUESTS)]
    positions = [dice.choice([0, 0, 1, 1, 2, 5, 20, 40]) for _ in range(REQUESTS)]
    config = model_config(tmp_path, transport="grpc", blocks=120, step_tokens=64, **topology)  # type: ignore[arg-type]  # ints and bools
    async with model_cluster(config) as cluster:
        expected = await collect(cluster, greedy(prompts[0], 20))
        work = [leave_at_position(cluster, *one) for one in zip(prompts, positions, strict=True)]
        read = await asyncio.gather(*work)
        assert all(came >= wanted for came, wanted in zip(read, positions, strict=True))
        again = await collect(cluster, greedy(prompts[0], 20))
        assert [token.token_id for token in again] == [token.token_id for token in expected]

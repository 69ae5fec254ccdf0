"""What a cancelled hand-over still writes hits nobody: its blocks belong to it until its last copy has ended."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from simulator.virtual_time import run
from tests.helpers.simulated_cluster import collect, request, simulated_cluster, simulated_config

LEFT = request(tuple(random.Random(1).choices(range(1000), k=60)), max_tokens=20)
NEXT = request(tuple(random.Random(2).choices(range(1000), k=60)), max_tokens=60)
LATE = 0.05
"""Seconds that a copy takes: the next request has its blocks and decodes by then, if it gets them early."""


def test_a_copy_that_ends_after_a_cancel_does_not_reach_the_next_request() -> None:
    async def main() -> None:
        async with simulated_cluster(simulated_config(aggregated=True)) as undisturbed:
            expected = await collect(undisturbed, NEXT)
        async with simulated_cluster(simulated_config(blocks=32)) as cluster:  # decode has room for one of them
            role: Any = cluster.workers["decode-0"]._role
            end = role._hand_over._transports["memory"]._ends
            accept, began = end.accept, asyncio.Event()

            async def late(payload: bytes, blocks: Sequence[int]) -> Any:
                await asyncio.sleep(LATE)
                return await accept(payload, blocks)

            async def unstoppable(payload: bytes, blocks: Sequence[int]) -> Any:
                end.accept = accept  # the first copy only
                began.set()
                copying = asyncio.create_task(late(payload, blocks))
                try:
                    return await asyncio.shield(copying)
                finally:
                    await asyncio.wait({copying})

            end.accept = unstoppable
            leaving = asyncio.create_task(collect(cluster, LEFT))
            await began.wait()
            leaving.cancel()
            assert await collect(cluster, NEXT) == expected

    run(main())

"""One decode worker cannot reach one prefill worker; every other pair works, so every request can be served."""

import asyncio
from typing import Any, cast

from cluster.local import LocalCluster
from engine.runners.simulated import SimulatedRunner
from protos.links.base import Link, LinkClosed
from simulator.virtual_time import run
from tests.helpers.simulated_cluster import CONTEXT, collect, request, simulated_config, step_cost
from tests.helpers.simulated_engine import NUMBER_TOKENS, VOCABULARY, simulated_layout
from worker.core import Vocabulary

REQUESTS = 30


class Refused:
    """A link over which nothing can be pulled from prefill-0: the connection is refused at once."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    async def open_pull(self, address: str) -> Any:
        if address.startswith("prefill-0"):
            raise LinkClosed(f"nobody answers at {address}")
        return await self._link.open_pull(address)


def test_a_request_is_placed_on_a_pair_that_works() -> None:
    async def main() -> None:
        config = simulated_config(prefill=2, decode=2)
        cluster = LocalCluster(
            config,
            lambda: SimulatedRunner(simulated_layout(config.kv.block_size), config.kv.blocks, VOCABULARY, step_cost),
            Vocabulary(NUMBER_TOKENS, frozenset(), CONTEXT),
            wrap_link=lambda name, link: cast(Link, Refused(link)) if name == "decode-0" else link,
        )
        await cluster.start()
        try:
            wanted = [request(tuple(range(number, number + 41))) for number in range(REQUESTS)]
            served = await asyncio.gather(*(collect(cluster, each) for each in wanted), return_exceptions=True)
            failed = [each for each in served if isinstance(each, BaseException)]
            assert not failed, f"{len(failed)} of {REQUESTS}, first: {failed[0]!r}"
        finally:
            await cluster.stop()

    run(main())

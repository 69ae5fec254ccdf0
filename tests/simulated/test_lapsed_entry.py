"""A prefill worker that cannot reach the registry any more, while everybody can reach it: it serves on."""

import asyncio
from collections.abc import AsyncGenerator

from shared_state.backends.base import BackendUnavailable
from simulator.virtual_time import run
from tests.helpers.simulated_cluster import collect, request, simulated_cluster, simulated_config


class CutOff:
    """A Backend behind a line that is cut."""

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        raise BackendUnavailable("the line is cut")

    async def delete(self, key: str, expected: bytes) -> None:
        raise BackendUnavailable("the line is cut")

    async def list(self, directory: str) -> dict[str, bytes]:
        raise BackendUnavailable("the line is cut")

    def watch(self, directory: str) -> AsyncGenerator[None]:
        raise BackendUnavailable("the line is cut")

    async def close(self) -> None:
        """Nothing is held."""


def test_an_idle_cluster_outlives_a_lapsed_entry() -> None:
    async def main() -> None:
        wanted = request(tuple(range(41)))
        config = simulated_config()
        async with simulated_cluster(config) as cluster:
            expected = await collect(cluster, wanted)
            cluster.workers["prefill-0"]._registry._backend = CutOff()
            await asyncio.sleep(10 * config.transfer.lease_seconds)
            assert {view.worker.id for view in cluster.router.workers()} == {"prefill-0", "decode-0"}
            assert await collect(cluster, wanted) == expected

    run(main())

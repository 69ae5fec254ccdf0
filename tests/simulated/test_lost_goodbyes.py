"""Pullers whose last message never comes: their exports end with the lease, and nothing leaks."""

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from cluster.local import LocalCluster
from contracts.handover import Abandon, Ack, Alive, ExporterMessage, PullerMessage
from contracts.requests import GenerateRequest
from protos.links.base import Duplex
from protos.links.memory import create
from protos.memory_network import MemoryNetwork
from simulator.virtual_time import run
from tests.helpers.simulated_cluster import collect, request, simulated_cluster, simulated_config

ROUNDS = 50
LEASE = 1.0
"""Short, because what is pinned in vain counts as backlog: few requests go on before it ends."""


class Mute:
    """A pull stream of which only the Pull itself reaches the other side, and not even its end."""

    def __init__(self, stream: Duplex[PullerMessage, ExporterMessage]) -> None:
        self._stream = stream

    async def send(self, message: PullerMessage) -> None:
        if not isinstance(message, Ack | Abandon | Alive):
            await self._stream.send(message)

    async def receive(self) -> ExporterMessage | None:
        return await self._stream.receive()

    async def close(self) -> None:
        """Nobody hears of it."""


@pytest.fixture(autouse=True)
def _mute_pullers(monkeypatch: pytest.MonkeyPatch) -> None:
    link = type(create(MemoryNetwork()))
    open_pull = link.open_pull

    async def muted(self: object, address: str) -> Mute:
        return Mute(await open_pull(self, address))  # type: ignore[arg-type]  # the class that it belongs to

    monkeypatch.setattr(link, "open_pull", muted)


def small_cluster(prefill: int = 1) -> AbstractAsyncContextManager[LocalCluster]:
    """Its pools hold a few prompts."""
    config = simulated_config(prefill=prefill, blocks=64)
    return simulated_cluster(replace(config, transfer=replace(config.transfer, lease_seconds=LEASE)))


def leases(cluster: LocalCluster) -> int:
    return len(cluster.workers["prefill-0"].core.blocks.holders())


async def leave_after(cluster: LocalCluster, wanted: GenerateRequest, tokens: int) -> None:
    """Read so many tokens, then go away."""
    answer = cluster.generate(wanted)
    async for output in answer:
        if output.tokens[-1].position >= tokens:
            break
    await answer.aclose()


def prompts(seed: int) -> list[tuple[int, ...]]:
    dice = random.Random(seed)
    return [tuple(dice.choices(range(1000), k=dice.randint(1, 60))) for _ in range(ROUNDS)]


def test_acknowledgements_that_are_lost() -> None:
    """Answers are whole; the blocks stay until the lease ends, and the pool, which holds a few of them, never
    runs dry for good."""

    async def main() -> None:
        async with small_cluster() as cluster:
            first = request(prompts(1)[0])
            expected = await collect(cluster, first)
            assert leases(cluster) == 1
            await asyncio.sleep(LEASE + 0.1)
            assert leases(cluster) == 0
            await asyncio.gather(*(collect(cluster, request(prompt)) for prompt in prompts(1)))
            assert leases(cluster) > 0
            await asyncio.sleep(LEASE + 0.1)
            assert leases(cluster) == 0
            assert await collect(cluster, first) == expected
            await asyncio.sleep(LEASE + 0.1)

    run(main())


@pytest.mark.parametrize("tokens", [1, 2])
def test_aborts_whose_end_nobody_hears(tokens: int) -> None:
    """The caller leaves while the blocks are on their way or have arrived; 50 times over, and then at once."""

    async def main() -> None:
        async with small_cluster() as cluster:
            for prompt in prompts(2):
                await leave_after(cluster, request(prompt, max_tokens=40), tokens)
            async with asyncio.TaskGroup() as tasks:
                for prompt in prompts(3):
                    tasks.create_task(leave_after(cluster, request(prompt, max_tokens=40), tokens))
            await asyncio.sleep(LEASE + 0.1)
            for host in cluster.workers.values():
                assert not host.core.blocks.holders()
            await collect(cluster, request(prompts(2)[0]))
            await asyncio.sleep(LEASE + 0.1)

    run(main())


def test_a_killed_prefill_worker_after_an_abort() -> None:
    """The other side of it: decode's room is its own, whoever dies."""

    async def main() -> None:
        async with small_cluster(prefill=2) as cluster:
            for prompt in prompts(4)[:10]:
                await leave_after(cluster, request(prompt, max_tokens=40), 1)
            host = cluster.workers.pop("prefill-0")
            cluster.network.kill(host.core.info.address)
            await host.stop(0.0)
            await asyncio.sleep(1)
            assert not cluster.workers["decode-0"].core.blocks.holders()
            await collect(cluster, request(prompts(4)[0]))
            await asyncio.sleep(LEASE + 0.1)

    run(main())

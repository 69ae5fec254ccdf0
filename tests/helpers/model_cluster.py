"""A whole cluster in one process with the real engine and a checkpoint, and its public ports if wanted.

For tests that need real numerics or the real APIs; processes, Ray and Redis are tested elsewhere.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx

from cluster.local import LocalCluster
from cluster.nodes import load_model, vocabulary_of
from contracts.config import Config, LimitsConfig
from contracts.requests import GenerateRequest, SamplingParams
from contracts.workers import Role
from engine.runners.base import Runner
from router.frontends import PublicPorts, RouterFrontends
from telemetry.tracing import Tracing
from tests.helpers.simulated_cluster import simulated_config
from text.model_resolver import resolve_model
from text.text_processor import TextProcessor

IDLE_SECONDS = 10.0


def model_config(
    model: Path | str,
    *,
    prefill: int = 1,
    decode: int = 1,
    aggregated: bool = False,
    transport: str = "memory",
    blocks: int = 160,
    block_size: int = 16,
    step_tokens: int = 512,
    max_running: int = 32,
) -> Config:
    """A cluster of one-threaded workers with small pools, served as "m"."""
    config = simulated_config(
        prefill=prefill,
        decode=decode,
        aggregated=aggregated,
        blocks=blocks,
        block_size=block_size,
        step_tokens=step_tokens,
        max_running=max_running,
    )
    return replace(
        config,
        model=replace(config.model, name=str(model), served_name="m"),
        engine=replace(config.engine, threads=1),
        transfer=replace(config.transfer, transport=transport),
        router=replace(config.router, http_port=0, grpc_port=0),
        limits=LimitsConfig(request_seconds=60.0),
    )


@asynccontextmanager
async def model_cluster(config: Config, tracing: Tracing | None = None) -> AsyncIterator[LocalCluster]:
    """A started cluster over the checkpoint `config.model.name`; at the end everything it held is back."""
    files = resolve_model(config.model, lambda line: None)
    text = TextProcessor(files)

    def make_runner() -> Runner:
        return load_model(config, files)[1]

    cluster = LocalCluster(config, make_runner, vocabulary_of(config, text), tracing)
    await cluster.start()
    try:
        yield cluster
        await idle(cluster)
        cluster.router.check()
    finally:
        await cluster.stop()


async def idle(cluster: LocalCluster) -> None:
    """Every block, slot and lease is back, and the audit agrees, within IDLE_SECONDS; checked at every
    change of a worker."""
    for worker_id, host in cluster.workers.items():
        core = host.core
        changed = asyncio.Event()
        notify = core.on_change

        def note(notify: object = notify, changed: asyncio.Event = changed) -> None:
            assert callable(notify)
            notify()
            changed.set()

        core.on_change = note
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                while core.blocks.holders() or core.scheduler.running or core.scheduler.waiting:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise AssertionError(f"{worker_id} still holds {core.blocks.holders()}") from None
        finally:
            core.on_change = notify
        core.check_blocks()
        assert core.blocks.available == core.blocks.total


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster with its public ports, and a client of each."""

    cluster: LocalCluster
    ports: PublicPorts
    client: httpx.AsyncClient
    channel: grpc.aio.Channel
    text: TextProcessor

    def hosts(self, role: Role) -> list[str]:
        """Worker ids of a role."""
        return [worker_id for worker_id in self.cluster.workers if worker_id.startswith(role.value)]


@asynccontextmanager
async def served_cluster(config: Config, tracing: Tracing | None = None) -> AsyncIterator[Served]:
    """model_cluster with HTTP and gRPC on free ports."""
    text = TextProcessor(resolve_model(config.model, lambda line: None))
    async with model_cluster(config, tracing) as cluster:
        frontends = RouterFrontends(config, cluster.router, text)
        ports = await frontends.start()
        try:
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http}", timeout=60) as client,
                grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel,
            ):
                yield Served(cluster, ports, client, channel, text)
        finally:
            await frontends.stop(0.0)


def greedy(prompt: list[int], max_tokens: int, logprobs: int | None = None) -> GenerateRequest:
    """A request for exactly max_tokens greedy tokens."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    return GenerateRequest(tuple(prompt), sampling, timeout=60.0)

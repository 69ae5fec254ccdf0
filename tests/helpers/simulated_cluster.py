"""A whole cluster in virtual time whose tokens depend on every byte of its KV."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from cluster.local import LocalCluster
from contracts.config import ClusterConfig, Config, EngineConfig, KvConfig, TransferConfig
from contracts.requests import GenerateRequest, SamplingParams, Token
from contracts.workers import Role
from engine.runners.base import Runner, StepPlan
from engine.runners.simulated import SimulatedRunner
from tests.helpers.simulated_engine import NUMBER_TOKENS, VOCABULARY, simulated_layout
from worker.core import Vocabulary

CONTEXT = 512


def simulated_config(
    *,
    prefill: int = 1,
    decode: int = 1,
    aggregated: bool = False,
    blocks: int = 128,
    block_size: int = 4,
    step_tokens: int = 32,
    max_running: int = 16,
) -> Config:
    """A small cluster."""
    return replace(
        Config(),
        cluster=ClusterConfig(
            mode="aggregated" if aggregated else "disaggregated",
            prefill=prefill,
            decode=decode,
            secret="secret",
            hash_key="key",
        ),
        engine=EngineConfig(step_tokens=step_tokens, max_running=max_running),
        kv=KvConfig(block_size=block_size, blocks=blocks, growth_tokens=8),
        transfer=TransferConfig(transport="memory"),
    )


def step_cost(plan: StepPlan) -> float:
    """Seconds of a step: 2 ms and 0.1 ms a token."""
    return 0.002 + 0.0001 * sum(len(row.tokens) for row in plan.rows)


@asynccontextmanager
async def simulated_cluster(
    config: Config, cost: Callable[[StepPlan], float] = step_cost
) -> AsyncIterator[LocalCluster]:
    """A started cluster; at the end everything it held must be back."""

    def make_runner() -> Runner:
        return SimulatedRunner(simulated_layout(config.kv.block_size), config.kv.blocks, VOCABULARY, cost)

    cluster = LocalCluster(config, make_runner, Vocabulary(NUMBER_TOKENS, frozenset(), CONTEXT))
    await cluster.start()
    try:
        yield cluster
        await settle()
        audit(cluster)
    finally:
        await cluster.stop()


SETTLE_SECONDS = 1.5
"""Virtual. Far below every lease and deadline: what they would clean up late shows as a leak."""


async def settle() -> None:
    """Let the last steps end and their frames arrive."""
    await asyncio.sleep(SETTLE_SECONDS)


def audit(cluster: LocalCluster) -> None:
    """Nothing is held anywhere: blocks, slots, leases, claims of the router."""
    cluster.router.check()
    for worker_id, host in cluster.workers.items():
        core = host.core
        core.check_blocks()
        assert core.blocks.available == core.blocks.total, f"{worker_id} leaks blocks: {core.blocks.holders()}"
        assert not core.blocks.holders()
    for view in cluster.router.workers():
        assert view.placed == 0
        assert view.load.running == view.load.waiting == 0
        if view.worker.role is Role.DECODE:
            assert view.load.free_slots == view.capacity.slots


def request(
    prompt: tuple[int, ...], *, max_tokens: int = 12, seed: int = 0, temperature: float = 0.0
) -> GenerateRequest:
    """A request for exactly max_tokens tokens."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature)
    return GenerateRequest(prompt, sampling, timeout=60.0)


async def collect(cluster: LocalCluster, wanted: GenerateRequest) -> list[Token]:
    """All tokens of a request, checked to come once and in order."""
    tokens: list[Token] = []
    async for output in cluster.generate(wanted):
        tokens.extend(output.tokens)
    assert [token.position for token in tokens] == list(range(1, len(tokens) + 1))
    assert tokens[-1].finish is not None
    assert all(token.finish is None for token in tokens[:-1])
    return tokens

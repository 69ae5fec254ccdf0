"""A worker with a simulated runner in a process of its own: `python -m tests.helpers.worker_process`.

It reads a pickled WorkerOrder from standard input, says one line when it serves, and ends in order on SIGTERM or when
its parent has gone.
"""

import asyncio
import ctypes
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvloop

from cluster.nodes import build_host
from contracts.config import Config
from contracts.seams import load_plug
from contracts.workers import Role, WorkerInfo
from engine.runners.base import StepPlan
from engine.runners.simulated import SimulatedRunner
from protos.links.base import Link
from shared_state.registry import Registry
from telemetry.tracing import NoTracing
from tests.helpers.simulated_cluster import CONTEXT
from tests.helpers.simulated_engine import NUMBER_TOKENS, VOCABULARY, simulated_layout
from worker.core import Vocabulary

GRACE = 5.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """`wrap` stands between the worker and its link; a module-level function, as it travels by name. `step_seconds`:
    of each step. `port` 0: any."""

    config: Config
    role: Role
    worker_id: str
    step_seconds: float
    wrap: Callable[[Link, str, int], Link] | None = None
    life: int = 1
    port: int = 0


async def serve(order: WorkerOrder) -> None:
    """Until SIGTERM."""
    config, stop = order.config, asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    backend = load_plug("registry", "redis").create(config.cluster.redis_url)
    link: Link = load_plug("link", "grpc").create()
    if order.wrap is not None:
        link = order.wrap(link, order.worker_id, order.life)

    def cost(plan: StepPlan) -> float:
        return order.step_seconds

    host = build_host(
        config,
        WorkerInfo(order.worker_id, order.role, f"{config.cluster.host}:{order.port}", time.time_ns(), os.getpid()),
        runner=SimulatedRunner(simulated_layout(config.kv.block_size), config.kv.blocks, VOCABULARY, cost),
        vocabulary=Vocabulary(NUMBER_TOKENS, frozenset(), CONTEXT),
        link=link,
        registry=Registry(backend, config.cluster.namespace),
        tracing=NoTracing(),
    )
    info = await host.start()
    sys.stdout.write(info.address + "\n")
    sys.stdout.flush()
    await stop.wait()
    await host.stop(GRACE)
    await backend.close()


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    uvloop.run(serve(pickle.load(sys.stdin.buffer)))  # noqa: S301 - from our own parent


if __name__ == "__main__":
    main()

"""A router with requests of its own in a process of its own: `python -m tests.helpers.router_process`.

It reads a pickled (config, requests) from standard input, says one line when every request has its first token, and
ends when all have ended.
"""

import asyncio
import ctypes
import pickle
import signal
import sys
import time

from cluster.nodes import build_router
from contracts.config import Config
from contracts.requests import GenerateRequest
from contracts.seams import load_plug
from router.service import RouterService
from router.sessions import ModelIdentity
from shared_state.registry import Registry
from telemetry.tracing import NoTracing
from tests.helpers.worker_process import PR_SET_PDEATHSIG


async def run(config: Config, wanted: list[GenerateRequest]) -> None:
    """All requests at once."""
    backend = load_plug("registry", "redis").create(config.cluster.redis_url)
    link = load_plug("link", "grpc").create()
    router = build_router(
        config,
        router_id="router-1",
        incarnation=time.time_ns(),
        link=link,
        registry=Registry(backend, config.cluster.namespace),
        identity=ModelIdentity(),
        tracing=NoTracing(),
    )
    router.start()
    await router.wait_ready()
    began = asyncio.Barrier(len(wanted) + 1)
    async with asyncio.TaskGroup() as tasks:
        for each in wanted:
            tasks.create_task(read(router, each, began))
        await began.wait()
        sys.stdout.write("all have begun\n")
        sys.stdout.flush()
    await router.stop()
    await link.close()
    await backend.close()


async def read(router: RouterService, wanted: GenerateRequest, began: asyncio.Barrier) -> None:
    """To the end; meets the others after the first token."""
    first = True
    async for _ in router.generate(wanted):
        if first:
            first = False
            await began.wait()


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    config, wanted = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent
    asyncio.run(run(config, wanted))


if __name__ == "__main__":
    main()

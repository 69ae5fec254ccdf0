"""A cluster of real worker processes with simulated runners, and a router in the test's own process.

Processes are started without Ray, so that one comes back within a second after it was killed; everything between them
is real: the grpc link, the transports, Redis, signals.
"""

import asyncio
import pickle
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from cluster.nodes import build_router
from contracts.config import ClusterConfig, Config, EngineConfig, KvConfig, TransferConfig
from contracts.requests import GenerateRequest, Token
from contracts.seams import load_plug
from contracts.workers import Role
from protos.links.base import Link
from router.service import RouterService
from router.sessions import ModelIdentity
from shared_state.registry import Registry
from telemetry.tracing import NoTracing
from tests.helpers.valkey import ValkeyServer
from tests.helpers.worker_process import WorkerOrder

IDLE_SECONDS = 5.0
POLL_SECONDS = 0.05
HELD = (
    "pdserve_leases",
    "pdserve_requests_running",
    "pdserve_requests_waiting",
    'pdserve_kv_blocks{state="used"}',
    'pdserve_kv_blocks{state="pinned"}',
    'pdserve_kv_blocks{state="reserved"}',
)

Wrap = Callable[[Link, str, int], Link]
WrapRouter = Callable[[Link], Link]


def process_config(
    *, prefill: int = 1, decode: int = 1, transport: str = "auto", blocks: int = 160, **transfer: float
) -> Config:
    """A small cluster with short times."""
    return replace(
        Config(),
        cluster=ClusterConfig(prefill=prefill, decode=decode, secret="secret", hash_key="key"),
        engine=EngineConfig(step_tokens=32, max_running=16),
        kv=KvConfig(block_size=4, blocks=blocks, growth_tokens=8),
        transfer=TransferConfig(transport=transport, **transfer),  # type: ignore[arg-type]  # floats by name
    )


class WorkerProcess:
    """One worker id: the process that serves under it, and its successors."""

    def __init__(self, order: WorkerOrder) -> None:
        self.order = order
        self.process: Process | None = None
        self.address = ""
        self.lives = 0
        self.descriptors = 0  # that it had open when it began to serve

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        """Returns when it serves."""
        self.lives += 1
        self.address = ""
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.helpers.worker_process"), stdin=PIPE, stdout=PIPE
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(pickle.dumps(replace(self.order, life=self.lives)))
        self.process.stdin.close()
        self.address = (await self.process.stdout.readline()).decode().strip()
        if self.address:  # else it died at once, which its keeper finds
            self.descriptors = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def signal(self, number: int) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        await self.process.wait()

    async def keep_alive(self) -> None:
        """Start it again whenever it has died of SIGKILL, until cancelled."""
        while True:
            assert self.process is not None
            code = await self.process.wait()
            assert code == -signal.SIGKILL, f"{self.order.worker_id} ended with {code}"
            await self.start()

    async def stop(self) -> int:
        """SIGTERM; its exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        return await self.process.wait()


class ProcessCluster:
    """See the module."""

    def __init__(self, config: Config, wrap: Wrap | None, wrap_router: WrapRouter, step_seconds: float) -> None:
        self.config = config
        self.workers: dict[str, WorkerProcess] = {}
        cluster = config.cluster
        for role, count in ((Role.PREFILL, cluster.prefill), (Role.DECODE, cluster.decode)):
            for number in range(count):
                worker_id = f"{role.value}-{number}"
                self.workers[worker_id] = WorkerProcess(WorkerOrder(config, role, worker_id, step_seconds, wrap))
        self.link: Link = wrap_router(load_plug("link", "grpc").create())
        self._backend = load_plug("registry", "redis").create(cluster.redis_url)
        self.router: RouterService = self._router("router-0")

    def _router(self, router_id: str) -> RouterService:
        return build_router(
            self.config,
            router_id=router_id,
            incarnation=time.time_ns(),
            link=self.link,
            registry=Registry(self._backend, self.config.cluster.namespace),
            identity=ModelIdentity(),
            tracing=NoTracing(),
        )

    async def start(self) -> None:
        """All serve and the router is ready when this returns."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self.workers.values():
                tasks.create_task(worker.start())
        self.router.start()
        await self.router.wait_ready()

    async def figures(self, worker_id: str) -> dict[str, float]:
        """A worker's metrics by name and labels, as its scrape says."""
        text = await self.link.scrape(self.workers[worker_id].address, 5.0)
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    async def collect(self, wanted: GenerateRequest) -> list[Token]:
        """All tokens of a request."""
        return [token async for output in self.router.generate(wanted) for token in output.tokens]

    async def until(
        self, worker_id: str, true: Callable[[dict[str, float]], bool], seconds: float = IDLE_SECONDS
    ) -> dict[str, float]:
        """A worker's figures once they are as wanted; fails after so long."""
        async with asyncio.timeout(seconds):
            while not true(figures := await self.figures(worker_id)):
                await _a_moment()
        return figures

    async def knows(self, worker_id: str, *, other_than: int) -> None:
        """Returns when the router has a session to another life of the worker, and takes requests."""
        async with asyncio.timeout(IDLE_SECONDS):
            while not any(
                view.worker.id == worker_id and view.worker.incarnation != other_than for view in self.router.workers()
            ):
                await _a_moment()
            await self.router.wait_ready()

    async def all_back(self, seconds: float = 100.0) -> None:
        """Returns when the router has a session to every worker as it is."""
        async with asyncio.timeout(seconds):
            while {view.worker.address for view in self.router.workers() if view.taking} != {
                worker.address for worker in self.workers.values()
            }:
                await _a_moment()
            await self.router.wait_ready()

    async def idle(self, seconds: float = IDLE_SECONDS) -> dict[str, dict[str, float]]:
        """The figures of all workers once nothing is held on any; fails when something stays. Nothing may wait for
        a lease or a deadline: the bound is far below both."""
        async with asyncio.timeout(seconds):
            while True:
                figures = {worker_id: await self.figures(worker_id) for worker_id in self.workers}
                held = {
                    (worker_id, name): value
                    for worker_id, found in figures.items()
                    for name, value in found.items()
                    if value and name in HELD
                }
                if not held:
                    break
                await _a_moment()
        self.router.check()
        assert not any(found["pdserve_audit_failures_total"] for found in figures.values())
        return figures

    async def stop(self) -> None:
        """Everything ends in order."""
        await self.router.drain(0.0)
        await self.router.stop()
        codes = {name: await worker.stop() for name, worker in self.workers.items()}
        await self.link.close()
        await self._backend.close()
        assert set(codes.values()) == {0}, codes


async def _a_moment() -> None:
    """Another process' state has no event for us."""
    await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def process_cluster(
    config: Config,
    directory: Path,
    wrap: Wrap | None = None,
    wrap_router: WrapRouter = lambda link: link,
    step_seconds: float = 0.005,
) -> AsyncIterator[ProcessCluster]:
    """A started cluster; every process has ended with code 0 when this returns. `wrap` and `wrap_router` stand between
    the workers, and the router, and their links."""
    with ValkeyServer(directory) as valkey:
        config = replace(config, cluster=replace(config.cluster, redis_url=valkey.url))
        cluster = ProcessCluster(config, wrap, wrap_router, step_seconds)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.stop()

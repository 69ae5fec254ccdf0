"""A whole cluster in one process and one event loop, with a memory registry.

Tests and simulations use it. Router, workers, hand-over and scheduler are the ones
of the real cluster. With transfer.transport "memory" links are memory too (and it runs in virtual time); any
other transport uses the grpc link on loopback.
"""

import os
from collections.abc import AsyncGenerator, Callable

from cluster.nodes import build_host, build_router
from contracts.config import Config
from contracts.requests import GenerateRequest, Output
from contracts.seams import load_plug
from contracts.workers import Role, WorkerInfo
from engine.runners.base import Runner
from protos.links.base import Link
from protos.memory_network import MemoryNetwork
from router.service import RouterService
from router.sessions import ModelIdentity
from shared_state.registry import Registry
from telemetry.tracing import NoTracing, Tracing
from worker.core import Vocabulary
from worker.host import WorkerHost


class LocalCluster:
    """config.cluster says how many workers of which role; `make_runner` is called once per worker start. `wrap_link`
    may put something round the link of each process, by the process's name."""

    def __init__(
        self,
        config: Config,
        make_runner: Callable[[], Runner],
        vocabulary: Vocabulary,
        tracing: Tracing | None = None,
        wrap_link: Callable[[str, Link], Link] = lambda _, link: link,
    ) -> None:
        self.config = config
        self.network = MemoryNetwork()
        self.workers: dict[str, WorkerHost] = {}
        self._make_runner = make_runner
        self._vocabulary = vocabulary
        self._tracing = tracing or NoTracing()
        self._wrap_link = wrap_link
        self._backend = load_plug("registry", "memory").create()
        self._incarnations = 0
        self._link = self._new_link("router-0")
        self.router: RouterService = build_router(
            self.config,
            router_id="router-0",
            incarnation=self._next_incarnation(),
            link=self._link,
            registry=self._registry(),
            identity=ModelIdentity(),
            tracing=self._tracing,
        )

    async def start(self) -> None:
        """All workers serve and the router knows them when this returns. Raises StartupError."""
        cluster = self.config.cluster
        if cluster.mode == "disaggregated":
            for number in range(cluster.prefill):
                await self.start_worker(Role.PREFILL, f"prefill-{number}")
        for number in range(cluster.decode):
            await self.start_worker(Role.DECODE, f"decode-{number}")
        self.router.start()
        await self.router.wait_ready()

    async def start_worker(self, role: Role, worker_id: str) -> WorkerHost:
        """A new incarnation of a worker. Raises ValueError while an older one runs."""
        if worker_id in self.workers:
            raise ValueError(f"{worker_id} runs already")
        address = f"{worker_id}:0" if self._in_memory else f"{self.config.cluster.host}:0"
        info = WorkerInfo(worker_id, role, address, self._next_incarnation(), os.getpid())
        host = build_host(
            self.config,
            info,
            runner=self._make_runner(),
            vocabulary=self._vocabulary,
            link=self._new_link(worker_id),
            registry=self._registry(),
            tracing=self._tracing,
        )
        self.workers[worker_id] = host
        await host.start()
        return host

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        """See RouterService.generate."""
        return self.router.generate(request)

    async def stop(self, grace: float = 0.0) -> None:
        """End every request, then router and workers. Idempotent."""
        await self.router.drain(grace)
        await self.router.stop()
        await self._link.close()
        while self.workers:
            _, host = self.workers.popitem()
            await host.stop(0.0)
        await self._backend.close()

    def _new_link(self, process: str) -> Link:
        link: Link
        if self._in_memory:
            link = load_plug("link", "memory").create(self.network)
        else:
            link = load_plug("link", "grpc").create()
        return self._wrap_link(process, link)

    @property
    def _in_memory(self) -> bool:
        return self.config.transfer.transport == "memory"

    def _registry(self) -> Registry:
        return Registry(self._backend, self.config.cluster.namespace)

    def _next_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

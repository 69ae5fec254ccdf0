"""A simulated cluster whose processes see the faults of a plan: they die and come back, freeze and thaw.

It has as many routers as its configuration says, and every process keeps its address over its lives, so that messages
for an old life reach the new one.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from cluster.local import LocalCluster
from cluster.nodes import build_router
from contracts.config import Config
from contracts.handover import ExporterMessage, PullerMessage
from contracts.requests import GenerateRequest, Output
from contracts.session import RouterMessage, WorkerMessage
from engine.runners.base import Runner, StepPlan
from engine.runners.simulated import SimulatedRunner
from protos.links.base import Duplex, Handler, Link
from protos.links.memory import create
from router.service import RouterService
from router.sessions import ModelIdentity
from shared_state.registry import Registry
from simulator.fault_plan import FaultPlan
from simulator.faulty_link import FaultyLink
from telemetry.tracing import NoTracing
from tests.helpers.simulated_cluster import CONTEXT, step_cost
from tests.helpers.simulated_engine import NUMBER_TOKENS, VOCABULARY, simulated_layout
from tests.helpers.slow_transport import slow_down
from worker.core import Vocabulary
from worker.host import WorkerHost


class _AtHome:
    """A link that serves at one address, whatever port it is asked for. Implements Link."""

    def __init__(self, inner: Link, address: str) -> None:
        self._inner = inner
        self._address = address

    async def serve(self, address: str, handler: Handler) -> str:
        return await self._inner.serve(self._address, handler)

    async def open_session(self, address: str) -> Duplex[RouterMessage, WorkerMessage]:
        return await self._inner.open_session(address)

    async def open_pull(self, address: str) -> Duplex[PullerMessage, ExporterMessage]:
        return await self._inner.open_pull(address)

    async def scrape(self, address: str, timeout: float) -> str:
        return await self._inner.scrape(address, timeout)

    async def close(self) -> None:
        await self._inner.close()


class _Silent:
    """What a router serves: nothing. It gives the network an address to kill and to freeze. Implements Handler."""

    async def session(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        """Ends at once."""

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        """Ends at once."""

    async def scrape(self) -> str:
        return ""


class _RouterLife:
    """One life of a router. Request ids count from 1 within it."""

    def __init__(self, service: RouterService, incarnation: int, link: Link) -> None:
        self.service = service
        self.incarnation = incarnation
        self.link = link
        self.asked = 0


class _Process:
    """Implements simulator.faulty_link.Process."""

    def __init__(self, cluster: "FaultedCluster", name: str) -> None:
        self._cluster = cluster
        self._name = name

    def kill(self, seconds: float) -> None:
        self._cluster.kill(self._name, seconds)

    def freeze(self, seconds: float) -> None:
        self._cluster.freeze(self._name, seconds)

    def leave(self, request_id: str) -> None:
        self._cluster.leave(request_id)


class FaultedCluster:
    """See faulted_cluster. Kills and freezes of a process that is down are ignored. `copy_seconds`: about how long each
    copy of a hand-over takes."""

    def __init__(
        self,
        config: Config,
        plan: FaultPlan,
        tasks: asyncio.TaskGroup,
        *,
        cost: Callable[[StepPlan], float],
        copy_seconds: float,
    ) -> None:
        self.config = config
        self.routers: dict[str, _RouterLife] = {}
        self._plan = plan
        self._cost = cost
        self._copy_seconds = copy_seconds
        self._tasks = tasks
        self._up: set[str] = set()
        self._frozen: Counter[str] = Counter()
        self._restored = asyncio.Event()
        self._clients: dict[str, Callable[[], object]] = {}
        self._router_lives = 0
        self.local = LocalCluster(
            config, self._make_runner, Vocabulary(NUMBER_TOKENS, frozenset(), CONTEXT), wrap_link=self._wrap
        )

    async def start(self) -> None:
        """Every router is ready when it returns."""
        await self.local.start()
        for host in self.local.workers.values():
            self._slow_down(host)
        await self.local.router.stop()  # ours can die and have addresses
        for number in range(self.config.cluster.routers):
            await self._start_router(f"router-{number}")
        for life in self.routers.values():
            await life.service.wait_ready()
        self._up = {*self.local.workers, *self.routers}

    async def stop(self) -> None:
        """End everything."""
        for life in self.routers.values():
            await life.service.stop()
            await life.link.close()
        await self.local.stop()

    def generate(self, router: str, request: GenerateRequest, leave: Callable[[], object]) -> AsyncGenerator[Output]:
        """See RouterService.generate. To be started in the turn in which it is called; `leave` makes its client go
        away."""
        life = self.routers[router]
        life.asked += 1
        self._clients[f"{life.incarnation}-{life.asked}"] = leave
        return life.service.generate(request)

    async def restored(self) -> None:
        """Every process is up and none is frozen."""
        while len(self._up) < len(self.local.workers) + len(self.routers) or self._frozen:
            self._restored.clear()
            await self._restored.wait()

    def kill(self, name: str, seconds: float) -> None:
        """Cut it off at once, let its tasks end, start it again after so many seconds."""
        if name not in self._up:
            return
        self._up.remove(name)
        self.local.network.kill(_address(name))
        self._tasks.create_task(
            self._router_reborn(name, seconds) if name in self.routers else self._reborn(name, seconds)
        )

    def freeze(self, name: str, seconds: float) -> None:
        """Nothing reaches it or leaves it for so many seconds."""
        if name not in self._up:
            return
        self._frozen[name] += 1
        self.local.network.freeze(_address(name))
        asyncio.get_running_loop().call_later(seconds, self._thaw, name)

    def leave(self, request_id: str) -> None:
        """The client of this request goes away."""
        self._clients[request_id]()

    def _thaw(self, name: str) -> None:
        self._frozen[name] -= 1
        if not self._frozen[name]:
            del self._frozen[name]
            if name in self._up:  # else it died frozen
                self.local.network.thaw(_address(name))
            self._restored.set()

    async def _reborn(self, name: str, seconds: float) -> None:
        host = self.local.workers[name]
        role = host.core.info.role
        await host.stop(0.0)
        await asyncio.sleep(seconds)
        del self.local.workers[name]
        self._slow_down(await self.local.start_worker(role, name))
        self._up.add(name)
        self._restored.set()

    async def _router_reborn(self, name: str, seconds: float) -> None:
        life = self.routers[name]
        await life.service.stop()
        await life.link.close()
        await asyncio.sleep(seconds)
        await self._start_router(name)
        self._up.add(name)
        self._restored.set()

    async def _start_router(self, name: str) -> None:
        self._router_lives += 1
        incarnation = 1_000_000 + self._router_lives
        link = self._wrap(name, create(self.local.network))
        await link.serve("", _Silent())
        service = build_router(
            self.config,
            router_id=name,
            incarnation=incarnation,
            link=link,
            registry=Registry(self.local._backend, self.config.cluster.namespace),
            identity=ModelIdentity(),
            tracing=NoTracing(),
        )
        self.routers[name] = _RouterLife(service, incarnation, link)
        service.start()

    def _slow_down(self, host: WorkerHost) -> None:
        if self._copy_seconds:
            slow_down(host, self._copy_seconds)

    def _wrap(self, name: str, link: Link) -> Link:
        return FaultyLink(_AtHome(link, _address(name)), self._plan, _Process(self, name))

    def _make_runner(self) -> Runner:
        kv = self.config.kv
        return SimulatedRunner(simulated_layout(kv.block_size), kv.blocks, VOCABULARY, self._cost)


@asynccontextmanager
async def faulted_cluster(
    config: Config,
    plan: FaultPlan,
    *,
    cost: Callable[[StepPlan], float] = step_cost,
    copy_seconds: float = 0.0,
) -> AsyncIterator[FaultedCluster]:
    """A started cluster, before the first fault: arm the plan."""
    plan.armed = False
    async with asyncio.TaskGroup() as tasks:
        cluster = FaultedCluster(config, plan, tasks, cost=cost, copy_seconds=copy_seconds)
        await cluster.start()
        yield cluster
        await cluster.stop()


def _address(name: str) -> str:
    return f"{name}:1"

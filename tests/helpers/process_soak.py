"""The soak on real processes: requests on a cluster whose workers kill, stop and disturb themselves at named points.

What a fault is and where it may be is the simulator's (fault_points.py, faulty_link.py); here each worker process has a
plan of its own and does to itself what the plan says. The router's plan only disturbs its messages and its clients.
"""

import asyncio
import os
import random
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from contracts.errors import NotReady, PdserveError
from contracts.requests import GenerateRequest, Token
from protos.links.base import Link
from simulator.fault_plan import Fault, FaultPlan, drawn
from simulator.fault_points import Action
from simulator.faulty_link import FaultyLink
from tests.helpers.process_cluster import ProcessCluster, process_cluster, process_config
from tests.helpers.simulated_cluster import collect, request, simulated_cluster, simulated_config

FAULTS_PER_LIFE = 15
FAULTY_LIVES = 3
"""Of each worker: the lives after them are calm, so that a batch comes to an end."""
CALM = signal.SIGUSR1
"""Tells a worker that nothing shall go wrong any more."""
MOST_KEPT = 2 * 8 * 4
"""Descriptors that a worker's links may keep for later: to two peers, eight channels, up to four files each (nccl)."""
BATCH_SECONDS = 240.0
RETRY_SECONDS = 0.5
SHARED_MEMORY = Path("/dev/shm")


class _Self:
    """What faults do to the worker process in which they happen."""

    def kill(self, seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGKILL)  # the test starts it again

    def freeze(self, seconds: float) -> None:
        # somebody else must wake it; it ends by itself
        subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def leave(self, request_id: str) -> None:
        raise AssertionError("clients are in another process")


class Journal(list[Fault]):
    """Faults that have happened, also those of processes that died of them."""

    def __init__(self, path: Path, process: str) -> None:
        super().__init__()
        self._path = path
        self._process = process

    def append(self, fault: Fault) -> None:
        super().append(fault)
        with self._path.open("a") as file:  # one write of a line is whole, whoever else writes
            file.write(f"{self._process}: {fault}\n")


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Goes round the links of all workers of a batch; it travels to their processes."""

    seed: int
    requests: int
    journal: Path

    def __call__(self, link: Link, worker_id: str, life: int) -> Link:
        """The link of one life of a worker, which sees about half of the requests."""
        seed = hash_of(self.seed, worker_id, life)
        plan = _plan(seed, max(1, self.requests // 2), without={Action.LEAVE})
        plan.armed = life <= FAULTY_LIVES
        plan.fired = Journal(self.journal, f"{worker_id} in life {life}")
        signal.signal(CALM, lambda *_: setattr(plan, "armed", False))
        return FaultyLink(link, plan, _Self())


def hash_of(*parts: object) -> int:
    """The same in every process, unlike hash()."""
    return random.Random(repr(parts)).getrandbits(32)


def _plan(seed: int, requests: int, without: set[Action]) -> FaultPlan:
    return FaultPlan(
        fault for fault in drawn(seed, requests=requests, faults=FAULTS_PER_LIFE).faults if fault.action not in without
    )


@dataclass(slots=True)
class Client:
    """A caller and what it gets."""

    wanted: GenerateRequest
    expected: list[Token]
    tokens: list[Token] = field(default_factory=list)
    error: PdserveError | None = None
    left: bool = False

    async def call(self, cluster: ProcessCluster, leaving: "Leaving") -> None:
        """Ask, and read to the end. Turned away while both workers of a role are dead, it comes again, as clients
        do."""
        try:
            while not await self._ask(cluster, leaving):  # noqa: ASYNC110 - when it is ready again is not for clients
                await asyncio.sleep(RETRY_SECONDS)
        except PdserveError as error:
            self.error = error
        except asyncio.CancelledError:
            self.left = True

    async def _ask(self, cluster: ProcessCluster, leaving: "Leaving") -> bool:
        """Whether it was let in."""
        try:
            async for output in cluster.router.generate(self.wanted):
                leaving.tasks[output.request_id] = asyncio.current_task()
                self.tokens.extend(output.tokens)
        except NotReady:
            if self.tokens:
                raise
            return False
        return True

    def check(self) -> None:
        """Raises AssertionError unless it got what it may get."""
        assert self.tokens == self.expected[: len(self.tokens)], f"{self.tokens} instead of {self.expected}"
        if not self.left and self.error is None:
            assert len(self.tokens) == len(self.expected), "it ended early"


class Leaving:
    """What faults do to clients, from the router's link."""

    def __init__(self) -> None:
        self.tasks: dict[str, asyncio.Task[None] | None] = {}

    def kill(self, seconds: float) -> None:
        raise AssertionError("the router is the test's own process")

    def freeze(self, seconds: float) -> None:
        raise AssertionError("the router is the test's own process")

    def leave(self, request_id: str) -> None:
        task = self.tasks.get(request_id)
        if task is not None:
            task.cancel()


async def soak_processes(directory: Path, *, seed: int, requests: int, transport: str) -> None:
    """One batch. Raises AssertionError with the seed and what happened."""
    journal = directory / "faults"
    journal.touch()
    try:
        async with asyncio.timeout(BATCH_SECONDS):
            await _batch(directory, journal, seed, requests, transport)
        assert len(journal.read_text().splitlines()) >= requests // 12, "too little has gone wrong"
    except BaseException as error:
        error.add_note(f"seed {seed}, {requests} requests over {transport}\n{journal.read_text()}")
        raise


async def _batch(directory: Path, journal: Path, seed: int, requests: int, transport: str) -> None:
    dice, leaving = random.Random(seed), Leaving()
    signal.signal(CALM, signal.SIG_IGN)  # inherited: a worker that is starting does not die of it
    clients = await _clients(dice, requests)
    config = process_config(prefill=2, decode=2, transport=transport, lease_seconds=5.0, silence_seconds=2.0)
    # on a busy machine a worker takes many seconds to come back, and both of a role may be away
    config = replace(config, limits=replace(config.limits, lost_seconds=30.0, attempts=20))
    router_plan = _plan(hash_of(seed, "router"), requests, without={Action.KILL, Action.FREEZE})
    router_plan.armed = False
    router_plan.fired = Journal(journal, "router")
    async with process_cluster(
        config,
        directory,
        wrap=Disturbance(seed, requests, journal),
        wrap_router=lambda link: FaultyLink(link, router_plan, leaving),
    ) as cluster:
        shared = set(SHARED_MEMORY.iterdir())
        router_plan.armed = True
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(worker.keep_alive()) for worker in cluster.workers.values()]
            calls = []
            for client in clients:
                calls.append(asyncio.create_task(client.call(cluster, leaving)))
                await asyncio.sleep(dice.choice((0.0, 0.01, 0.1)))
            await asyncio.wait(calls)
            router_plan.armed = False
            for _ in range(2):  # the second time for those that were starting
                for worker in cluster.workers.values():
                    worker.signal(signal.SIGCONT)
                    worker.signal(CALM)
                await cluster.all_back()
            for task in keeping:
                task.cancel()
        for call, client in zip(calls, clients, strict=True):
            call.result()
            client.check()
        staying = [client for client in clients if not client.left]
        served = sum(client.error is None for client in staying)
        assert served >= 0.6 * len(staying) > 0, Counter(type(client.error).__name__ for client in clients)
        await cluster.idle(seconds=40.0)
        probe = await cluster.collect(clients[0].wanted)
        assert probe == clients[0].expected
        await cluster.idle(seconds=40.0)
        assert set(SHARED_MEMORY.iterdir()) == shared
        for worker_id, worker in cluster.workers.items():
            open_now = len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))
            assert open_now <= worker.descriptors + MOST_KEPT, f"{worker_id} has {open_now} files open"


async def _clients(dice: random.Random, count: int) -> list[Client]:
    wanted = [
        request(
            tuple(dice.choices(range(1000), k=dice.choice((1, 3, 4, 5, 31, 32, 33, 60)))),
            max_tokens=dice.choice((1, 2, 8, 40)),
            seed=dice.getrandbits(16),
            temperature=dice.choice((0.0, 1.0)),
        )
        for _ in range(count)
    ]
    async with simulated_cluster(simulated_config(aggregated=True, blocks=1024), lambda plan: 0.0) as cluster:
        return [Client(each, await collect(cluster, each)) for each in wanted]

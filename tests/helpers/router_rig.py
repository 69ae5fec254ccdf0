"""A router service on memory links with scripted workers, in virtual time."""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from contracts.config import Config
from contracts.errors import ErrorInfo, PdserveError
from contracts.kv import KvLayout
from contracts.requests import AttemptKey, FinishReason, GenerateRequest, Output, SamplingParams, Token
from contracts.session import (
    Cancel,
    Failed,
    Hello,
    Reserved,
    RouterMessage,
    Submit,
    Tokens,
    Welcome,
    WorkerEvent,
    WorkerFrame,
    WorkerMessage,
)
from contracts.workers import Role, WorkerCapacity, WorkerInfo, WorkerLoad
from protos.links import memory
from protos.links.base import Duplex, LinkClosed
from protos.memory_network import MemoryNetwork
from router.assembly import build_service
from router.ledger import WorkerAccount
from router.service import RouterService
from router.sessions import ModelIdentity
from simulator.virtual_time import run
from telemetry.tracing import NoTracing, Tracing


def idle_load(capacity: WorkerCapacity) -> WorkerLoad:
    """Of a worker that has nothing to do."""
    return WorkerLoad(capacity.blocks, capacity.slots, backlog_tokens=0, running=0, waiting=0)


def account_of(worker_id: str, role: Role, capacity: WorkerCapacity) -> WorkerAccount:
    """Of a worker that has nothing to do."""
    return WorkerAccount(worker_id, role, capacity, idle_load(capacity))


LAYOUT = KvLayout("model", "tokenizer", "numerics", "float32", 1, 1, 4, 16, "rope")


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in virtual time. Heartbeats never end, so that a test that waits in vain needs an end."""

    async def bounded(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(600):
            await test(*args, **kwargs)

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        run(bounded(*args, **kwargs))

    return wrapper


async def idle() -> None:
    """Until nobody has anything to do: virtual time only moves then."""
    await asyncio.sleep(0.001)


def request(prompt: int = 20, max_tokens: int = 8, timeout: float = 60.0) -> GenerateRequest:
    """A prompt of so many tokens."""
    return GenerateRequest(tuple(range(prompt)), SamplingParams(max_tokens, seed=1), timeout)


def token(position: int, finish: FinishReason | None = None) -> Token:
    """Token 100 + position."""
    return Token(position, 100 + position, f"t{position} ", finish=finish)


class FakeRegistry:
    """Snapshots that the test sets."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerInfo] = {}
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Break the watch."""
        self._error = error
        self._changed.set()

    def put(self, *workers: WorkerInfo) -> None:
        self.workers.update((worker.id, worker) for worker in workers)
        self._changed.set()

    def remove(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self._changed.set()

    async def watch(self) -> AsyncGenerator[list[WorkerInfo], None]:
        while True:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            yield list(self.workers.values())
            await self._changed.wait()


class FakeWorker:
    """Speaks the session protocol; the test says what it answers. `load` rides on every frame."""

    def __init__(self, network: MemoryNetwork, worker_id: str, role: Role, **capacity: int) -> None:
        self.info = WorkerInfo(worker_id, role, f"{worker_id}:1", incarnation=1, pid=1)
        fields = {"blocks": 64, "slots": 8, "backlog_tokens": 1024, "max_context": 1024} | capacity
        self.capacity = WorkerCapacity(layout=LAYOUT, **fields)
        self.load = WorkerLoad(self.capacity.blocks, self.capacity.slots, 0, 0, 0)
        self.submits: asyncio.Queue[Submit] = asyncio.Queue()
        self.cancels: asyncio.Queue[Cancel] = asyncio.Queue()
        self.sessions = 0
        self._network = network
        self._link = memory.create(network)
        self._stream: Duplex[WorkerMessage, RouterMessage] | None = None

    async def serve(self) -> None:
        await self._link.serve(self.info.address, self)

    async def close(self) -> None:
        await self._link.close()

    def kill(self) -> None:
        self._network.kill(self.info.address)

    async def come_back(self) -> None:
        """Serve again after a kill, as a new incarnation."""
        self.info = dataclasses.replace(self.info, incarnation=self.info.incarnation + 1)
        self._link = memory.create(self._network)
        await self.serve()

    async def session(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        assert isinstance(await stream.receive(), Hello)
        self._stream = stream
        self.sessions += 1
        await stream.send(Welcome(self.info, self.capacity, self.load))
        async with asyncio.TaskGroup() as tasks:
            beat = tasks.create_task(self._beat(stream))
            try:
                while (message := await stream.receive()) is not None:
                    if isinstance(message, Submit):
                        self.submits.put_nowait(message)
                    elif isinstance(message, Cancel):
                        self.cancels.put_nowait(message)
            except LinkClosed:
                pass  # the router went away, which ends a session too
            beat.cancel()

    async def _beat(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        try:
            while True:
                await asyncio.sleep(0.5)
                await stream.send(WorkerFrame(self.load))
        except LinkClosed:
            return

    async def pull(self, stream: Duplex[Any, Any]) -> None:
        raise AssertionError("nobody pulls from this worker")

    async def scrape(self) -> str:
        return f"# HELP up It is.\n# TYPE up gauge\nup {self.sessions}\n"

    async def say(self, *events: WorkerEvent) -> None:
        assert self._stream is not None
        await self._stream.send(WorkerFrame(self.load, events))

    async def reserved(self, key: AttemptKey) -> None:
        await self.say(Reserved(key))

    async def tokens(self, key: AttemptKey, *tokens: Token, cached: int = 0) -> None:
        await self.say(Tokens(key, tokens, cached))

    async def failed(self, key: AttemptKey, error: PdserveError | ErrorInfo) -> None:
        await self.say(Failed(key, error.info() if isinstance(error, PdserveError) else error))


class Observed:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def bind(
        self,
        waiting: Callable[[], int],
        running: Callable[[], int],
        workers: Callable[[], dict[str, int]],
        queued_tokens: Callable[[], int],
    ) -> None:
        self.waiting, self.running, self.workers, self.queued_tokens = waiting, running, workers, queued_tokens

    def all(self, name: str) -> list[Any]:
        return [value for called, value in self.calls if called == name]

    def request_finished(self, outcome: str, seconds: float) -> None:
        self.calls.append(("finished", outcome))

    def ttft(self, seconds: float) -> None:
        self.calls.append(("ttft", seconds))

    def tpot(self, seconds: float) -> None:
        self.calls.append(("tpot", seconds))

    def inter_token(self, seconds: float) -> None:
        self.calls.append(("inter_token", seconds))

    def queue_wait(self, outcome: str, seconds: float) -> None:
        self.calls.append(("queue_wait", (outcome, seconds)))

    def refused(self, reason: str) -> None:
        self.calls.append(("refused", reason))

    def attempt_failed(self, code: str) -> None:
        self.calls.append(("attempt_failed", code))

    def dropped_message(self) -> None:
        self.calls.append(("dropped", 1))


class Call:
    """One request that a task reads to its end."""

    def __init__(self, generator: AsyncGenerator[Output, None]) -> None:
        self.outputs: list[Output] = []
        self.task = asyncio.get_running_loop().create_task(self._read(generator))

    async def _read(self, generator: AsyncGenerator[Output, None]) -> None:
        try:
            async for output in generator:
                self.outputs.append(output)
        finally:
            await generator.aclose()

    @property
    def positions(self) -> list[int]:
        return [token.position for output in self.outputs for token in output.tokens]

    async def end(self) -> list[int]:
        """Positions of all tokens; raises what the request ended with."""
        await self.task
        return self.positions

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        assert self.task.cancelled()


class Rig:
    """The service, its registry and its workers."""

    def __init__(self, network: MemoryNetwork, config: Config, identity: ModelIdentity, tracing: Tracing) -> None:
        self.network = network
        self.registry = FakeRegistry()
        self.observed = Observed()
        self.link = memory.create(network)
        self.service: RouterService = build_service(
            config,
            router_id="router-0",
            incarnation=7,
            link=self.link,
            registry=self.registry,
            identity=identity,
            tracing=tracing,
            observer=self.observed,
            exposition=lambda: "# HELP own Ours.\n# TYPE own gauge\nown 1\n",
        )
        self.calls: list[Call] = []

    def ask(self, asked: GenerateRequest) -> Call:
        call = Call(self.service.generate(asked))
        self.calls.append(call)
        return call

    async def start(self, *workers: FakeWorker) -> None:
        for worker in workers:
            await worker.serve()
        self.registry.put(*(worker.info for worker in workers))


@asynccontextmanager
async def rig(
    *workers: tuple[str, Role, dict[str, int]],
    settings: Callable[[Config], Config] = lambda config: config,
    identity: ModelIdentity | None = None,
    tracing: Tracing | None = None,
) -> AsyncIterator[tuple[Rig, dict[str, FakeWorker]]]:
    """A started router with open sessions to these workers. At the end every request must be over
    and all books at zero."""
    network = MemoryNetwork()
    made = Rig(network, settings(Config()), identity or ModelIdentity(), tracing or NoTracing())
    fakes = {name: FakeWorker(network, name, role, **capacity) for name, role, capacity in workers}
    await made.start(*fakes.values())
    made.service.start()
    await idle()  # the sessions are open
    try:
        yield made, fakes
        assert all(call.task.done() for call in made.calls), "a request is still open"
        await idle()
        made.service.check()
        assert made.observed.waiting() == made.observed.running() == made.observed.queued_tokens() == 0
        assert [view.placed for view in made.service.workers()] == [0] * len(made.service.workers())
    finally:
        await made.service.stop()
        await made.link.close()
        for worker in fakes.values():
            await worker.close()


PAIR: tuple[tuple[str, Role, dict[str, int]], ...] = (("p0", Role.PREFILL, {}), ("d0", Role.DECODE, {}))

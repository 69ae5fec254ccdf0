"""A network inside one event loop: what memory links (protos/links/memory.py) connect through.

Tests, the simulator and cluster/local.py make one and share it between their links; tests of faults also
kill and freeze endpoints on it. Messages are handed over by reference. It uses no timer and no thread, so
it runs in virtual time, and wakes waiters in the order in which they came.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from contracts.errors import StartupError
from protos.links.base import Handler, LinkClosed

MessageT = TypeVar("MessageT")

QUEUE_MESSAGES = 8
"""Messages in flight in one direction of a stream before its sender waits."""


class MemoryNetwork:
    """Connects endpoints by name, and injects faults for tests."""

    def __init__(self) -> None:
        self._serving: dict[str, Endpoint] = {}
        self._ports = 0

    def bind(self, endpoint: "Endpoint", address: str, handler: Handler) -> str:
        """Serve at `address`; a port 0 is replaced by an unused number. Raises StartupError when the address
        is taken."""
        if address.endswith(":0"):
            self._ports += 1
            address = f"{address[:-2]}:{self._ports}"
        holder = self._serving.get(address)
        if holder is not None and holder.handler is not None:
            raise StartupError(f"cannot listen on {address}: address already in use")
        endpoint.handler = handler
        self._serving[address] = endpoint
        return address

    def find(self, address: str) -> "tuple[Endpoint, Handler]":
        """Who serves at `address`, and with what. Raises LinkClosed when nobody does."""
        endpoint = self._serving.get(address)
        if endpoint is None or endpoint.handler is None:
            raise LinkClosed(f"nobody answers at {address}")
        return endpoint, endpoint.handler

    def kill(self, address: str) -> None:
        """Like kill -9: every stream of the endpoint that serves there breaks, also those that it opened,
        and what is in flight is lost. Until somebody serves at the address again, nobody answers."""
        self.find(address)[0].stop(f"{address} was killed")

    def freeze(self, address: str) -> None:
        """Like SIGSTOP: what is sent to the endpoint or by it is held, as far as the queues reach."""
        self.find(address)[0].set_frozen(True)

    def thaw(self, address: str) -> None:
        """Like SIGCONT: what was held arrives, in order."""
        self.find(address)[0].set_frozen(False)


class Endpoint:
    """One process on the network: what it serves with and the streams that it takes part in."""

    def __init__(self) -> None:
        self.handler: Handler | None = None  # None while it does not serve
        self.pipes: dict[Pipe[Any], None] = {}  # an ordered set
        self.tasks: dict[asyncio.Task[None], None] = {}  # an ordered set: one for each stream that it answers
        self._thawed = asyncio.Event()
        self._thawed.set()

    @property
    def frozen(self) -> bool:
        return not self._thawed.is_set()

    def set_frozen(self, frozen: bool) -> None:
        """While frozen, no message arrives at this endpoint or from it."""
        if frozen:
            self._thawed.clear()
            return
        self._thawed.set()
        for pipe in self.pipes:
            pipe.wake()

    async def thawed(self) -> None:
        """Waits while frozen."""
        await self._thawed.wait()

    def answer(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task of this endpoint."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)

    def stop(self, reason: str) -> None:
        """Serves no more and breaks every stream of this endpoint."""
        self.handler = None
        for pipe in tuple(self.pipes):
            pipe.break_off(reason)
        self._thawed.set()


class Pipe(Generic[MessageT]):
    """One direction of a stream: a bounded queue with an end, for one sender and one receiver."""

    def __init__(self, ends: tuple[Endpoint, Endpoint]) -> None:
        self._ends = ends
        self._queue: deque[MessageT] = deque()
        self._ended = False
        self._broken = ""
        self._waiters: list[asyncio.Future[None]] = []
        for end in ends:
            end.pipes[self] = None

    async def put(self, message: MessageT) -> None:
        """Waits for room. Raises LinkClosed when the pipe has ended or broken."""
        while not (self._ended or self._broken) and len(self._queue) >= QUEUE_MESSAGES:
            await self._change()
        if self._ended or self._broken:
            raise LinkClosed(self._broken or "the stream is closed")
        self._queue.append(message)
        self.wake()

    async def get(self) -> MessageT | None:
        """Waits for a message; None after the last one of an ended pipe. Raises LinkClosed when it broke."""
        while not self._broken and (any(end.frozen for end in self._ends) or not (self._queue or self._ended)):
            await self._change()
        if self._broken:
            raise LinkClosed(self._broken)
        if not self._queue:
            return None
        self.wake()
        return self._queue.popleft()

    def end(self) -> None:
        """The sender is done; what is in the queue still arrives. Idempotent."""
        self._ended = True
        self.wake()

    def break_off(self, reason: str) -> None:
        """Both ends learn `reason`; what is in the queue is lost. The first reason stays."""
        self._broken = self._broken or reason
        self._queue.clear()
        for end in self._ends:
            end.pipes.pop(self, None)
        self.wake()

    def wake(self) -> None:
        """Let those who wait look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

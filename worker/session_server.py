"""The worker's end of the sessions with routers.

Each session is one stream: Hello and Welcome, then commands in and at most one frame per engine step out.
A role (prefill_workers, decode_workers) handles the commands. The step loop never awaits a socket: events
are put into the session's outbox, and one task per session writes them.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable
from typing import Protocol

from contracts.requests import AttemptKey
from contracts.session import (
    Cancel,
    Hello,
    RouterMessage,
    Submit,
    Tokens,
    Welcome,
    WorkerEvent,
    WorkerFrame,
    WorkerMessage,
)
from contracts.workers import WorkerLoad, WorkerState
from protos.links.base import Duplex, LinkClosed

_log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 1.0
_HELLO_SECONDS = 5.0
Emit = Callable[[WorkerEvent], None]


class Commands(Protocol):
    """What a role does with a router's commands. Synchronous: it starts or stops work and returns."""

    def submit(self, message: Submit, emit: Emit) -> None: ...

    def cancel(self, key: AttemptKey, reason: str) -> None:
        """Stop the attempt in whatever state it is; unknown attempts are fine."""

    def cancel_session(self, emit: Emit, reason: str) -> None:
        """Stop every attempt that was submitted with this `emit`."""


class Outbox:
    """Events that wait for the next frame. Tokens of one attempt merge while they wait."""

    def __init__(self) -> None:
        self._events: list[WorkerEvent] = []
        self._tokens_at: dict[AttemptKey, int] = {}
        self.ready = asyncio.Event()

    def put(self, event: WorkerEvent) -> None:
        """Add an event, in order per attempt."""
        if isinstance(event, Tokens):
            at = self._tokens_at.get(event.key)
            if at is not None:
                waiting = self._events[at]
                assert isinstance(waiting, Tokens)
                cached = max(waiting.cached_tokens, event.cached_tokens)
                self._events[at] = Tokens(event.key, waiting.tokens + event.tokens, cached)
                return
            self._tokens_at[event.key] = len(self._events)
        self._events.append(event)
        self.ready.set()

    def take(self) -> tuple[WorkerEvent, ...]:
        """All waiting events; the outbox is empty behind it."""
        events, self._events = tuple(self._events), []
        self._tokens_at.clear()
        self.ready.clear()
        return events


class SessionServer:
    """All sessions of one worker."""

    def __init__(
        self, commands: Commands, welcome: Callable[[], Welcome], load: Callable[[], WorkerLoad], secret: str
    ) -> None:
        self._commands = commands
        self._welcome = welcome
        self._load = load
        self._secret = secret.encode()
        self._outboxes: dict[Outbox, None] = {}  # in order, so that a run can be repeated
        self._none = asyncio.Event()
        self._none.set()

    def load_changed(self) -> None:
        """Tell every router the load with the next frame, even when nothing else happened."""
        for outbox in self._outboxes:
            outbox.ready.set()

    async def left(self) -> None:
        """Returns when no router has a session any more. A draining worker's routers leave when they have read
        how their last attempt ended, and it lets nobody in."""
        await self._none.wait()

    async def serve(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        """One session until it ends; its end cancels everything that came over it."""
        outbox = Outbox()
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                hello = await stream.receive()
            if not isinstance(hello, Hello):
                return
            if not hmac.compare_digest(hello.secret.encode(), self._secret):
                _log.warning("session refused: router %s does not have the cluster secret", hello.router_id)
                return
            welcome = self._welcome()
            if welcome.worker.state is WorkerState.DRAINING:
                return
            await stream.send(welcome)
            self._outboxes[outbox] = None
            self._none.clear()
            outbox.ready.set()
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(stream, outbox))
                await self._read(stream, outbox)
                writer.cancel()
        except TimeoutError:
            _log.warning("a stream said no Hello within %g s", _HELLO_SECONDS)
        finally:
            self._outboxes.pop(outbox, None)
            if not self._outboxes:
                self._none.set()
            self._commands.cancel_session(outbox.put, "the router's session ended")

    async def _read(self, stream: Duplex[WorkerMessage, RouterMessage], outbox: Outbox) -> None:
        try:
            while (message := await stream.receive()) is not None:
                match message:
                    case Submit():
                        self._commands.submit(message, outbox.put)
                    case Cancel():
                        self._commands.cancel(message.key, message.reason)
                    case Hello():
                        _log.warning("router %s said Hello twice", message.router_id)
        except LinkClosed as closed:
            _log.debug("session ended: %s", closed)

    async def _write(self, stream: Duplex[WorkerMessage, RouterMessage], outbox: Outbox) -> None:
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await outbox.ready.wait()
                await stream.send(WorkerFrame(self._load(), outbox.take()))
        except LinkClosed as closed:
            _log.debug("a router no longer reads: %s", closed)
            await stream.close()

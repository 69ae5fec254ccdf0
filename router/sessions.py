"""The router's end of a session with one worker: one stream, many attempts.

The fleet opens and runs it; attempts submit and cancel over it. `submit`, `cancel` and `forget` are plain
calls: one task drains the outbox, so nothing that ends a request waits for a socket.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from contracts.errors import Incompatible, Stale, WorkerLost
from contracts.kv import KvLayout
from contracts.requests import AttemptKey
from contracts.session import (
    Cancel,
    Failed,
    Hello,
    RouterMessage,
    Submit,
    Welcome,
    WorkerEvent,
    WorkerFrame,
    WorkerMessage,
)
from contracts.workers import WorkerInfo
from protos.links.base import Duplex, Link, LinkClosed
from protos.patience import receive_within
from router.ledger import WorkerAccount

_OPEN_SECONDS = 5.0
_SILENCE_SECONDS = 3.0  # workers send a frame at least each second

Sink = Callable[[WorkerEvent], None]
"""Takes the events of one attempt from one worker, in order, in the turn in which their frame arrives."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Fingerprints that a worker must share with the router; "" is not compared."""

    model: str = ""
    tokenizer: str = ""

    def check(self, layout: KvLayout) -> None:
        """Raises Incompatible naming both values."""
        for name, mine, theirs in (
            ("model", self.model, layout.model),
            ("tokenizer", self.tokenizer, layout.tokenizer),
        ):
            if mine and mine != theirs:
                raise Incompatible(f"{name}: {mine!r} at the router, {theirs!r} at the worker")


async def open_stream(
    link: Link, worker: WorkerInfo, hello: Hello, identity: ModelIdentity
) -> tuple[Duplex[RouterMessage, WorkerMessage], Welcome]:
    """Connect and shake hands. Raises LinkClosed (nobody answers in time), Stale (another process answers than
    the registry named) or Incompatible (another model)."""
    try:
        async with asyncio.timeout(_OPEN_SECONDS):
            stream = await link.open_session(worker.address)
            try:
                await stream.send(hello)
                welcome = _checked(await stream.receive(), worker, identity)
            except BaseException:
                await stream.close()
                raise
    except TimeoutError as error:
        raise LinkClosed(f"no welcome within {_OPEN_SECONDS:g} s") from error
    return stream, welcome


class WorkerSession:
    """A session after its Welcome. `on_frame` is called after the events of a frame went to their attempts;
    `on_end` when it ends, before its attempts hear of it; `on_dropped` for an event that nobody waits for."""

    def __init__(
        self,
        worker: WorkerInfo,
        stream: Duplex[RouterMessage, WorkerMessage],
        account: WorkerAccount,
        *,
        on_frame: Callable[[], None],
        on_end: Callable[["WorkerSession"], None],
        on_dropped: Callable[[], None],
    ) -> None:
        self.worker = worker
        self.account = account
        self._stream = stream
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_dropped = on_dropped
        self._sinks: dict[AttemptKey, Sink] = {}
        self._outbox: asyncio.Queue[RouterMessage] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._last_frame = asyncio.get_running_loop().time()

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return not self._ended.is_set()

    def heard_within(self, seconds: float) -> bool:
        """Whether a frame came in the last so many seconds."""
        return asyncio.get_running_loop().time() - self._last_frame <= seconds

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Send one leg of an attempt; its events go to `sink` until `cancel` or `forget`."""
        assert not self._ended.is_set()
        self._sinks[submit.key] = sink
        self._outbox.put_nowait(submit)

    def cancel(self, key: AttemptKey, reason: str) -> None:
        """Stop the leg, whatever state it is in."""
        if self._sinks.pop(key, None) is not None:
            self._outbox.put_nowait(Cancel(key, reason))

    def forget(self, key: AttemptKey) -> None:
        """The leg is over on the worker's side."""
        self._sinks.pop(key, None)

    def end(self, reason: str) -> None:
        """The worker is lost, for good: every attempt on it hears so in this turn. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._on_end(self)
        lost = WorkerLost(f"{self.worker.role.value} worker {self.worker.id} was lost: {reason}").info()
        sinks, self._sinks = self._sinks, {}
        for key, sink in sinks.items():
            sink(Failed(key, lost))

    async def run(self) -> None:
        """Move messages until the session ends. The stream is closed afterwards."""
        try:
            async with asyncio.TaskGroup() as tasks:
                movers = [tasks.create_task(self._send()), tasks.create_task(self._receive())]
                await self._ended.wait()
                for mover in movers:
                    mover.cancel()
        finally:
            self.end("the router closed the session")
            await self._stream.close()

    async def _send(self) -> None:
        try:
            while True:
                await self._stream.send(await self._outbox.get())
        except LinkClosed as error:
            self.end(str(error))

    async def _receive(self) -> None:
        try:
            while True:
                message = await receive_within(self._stream, _SILENCE_SECONDS)
                if not isinstance(message, WorkerFrame):
                    self.end("it closed the session" if message is None else "it broke the protocol of the session")
                    return
                self._frame(message)
        except LinkClosed as error:
            self.end(str(error))
        except TimeoutError:
            self.end(f"nothing was heard for {_SILENCE_SECONDS:g} s")

    def _frame(self, frame: WorkerFrame) -> None:
        self._last_frame = asyncio.get_running_loop().time()
        self.account.frame(frame)
        for event in frame.events:
            sink = self._sinks.get(event.key)
            if sink is None:
                self._on_dropped()
            else:
                sink(event)
        self._on_frame()
        if frame.load.draining and not self._sinks:
            self.end("it has drained")


def _checked(answer: WorkerMessage | None, worker: WorkerInfo, identity: ModelIdentity) -> Welcome:
    if not isinstance(answer, Welcome):
        raise LinkClosed("the worker did not welcome the session")
    found = answer.worker
    if (found.id, found.role, found.incarnation) != (worker.id, worker.role, worker.incarnation):
        raise Stale(f"registered is {worker}, but {found} answers")
    identity.check(answer.capacity.layout)
    return answer

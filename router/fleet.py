"""The fleet: a session to every worker that the registry names, and what they all have together.

The service runs it, places on it and asks it for its state. A worker with a live session is alive whatever
the registry says: a lapsed lease only forbids new sessions.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from contracts.errors import Incompatible, Stale
from contracts.requests import AttemptKey
from contracts.session import Hello, RouterMessage, Welcome, WorkerMessage
from contracts.workers import Role, WorkerCapacity, WorkerInfo, WorkerLoad, WorkerState
from protos.links.base import Duplex, Link, LinkClosed
from router.ledger import Ledger, Need, WorkerAccount
from router.observer import RouterObserver
from router.sessions import ModelIdentity, WorkerSession, open_stream

_FIRST_BACKOFF, _LAST_BACKOFF = 0.2, 2.0  # seconds between tries to connect
_HEARD_SECONDS = 2.0
_SCRAPE_SECONDS = 0.3


class WorkerSource(Protocol):
    """Where workers are found (shared_state's registry)."""

    def watch(self) -> AsyncGenerator[list[WorkerInfo], None]:
        """All processes with a lease: once at the start and after every change. Never raises for outages."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A live worker for people and policies. `placed`: attempts of this router on it."""

    worker: WorkerInfo
    capacity: WorkerCapacity
    load: WorkerLoad
    placed: int
    taking: bool


@dataclass(frozen=True, slots=True)
class WorkerScrape:
    """A worker's own metrics as Prometheus text."""

    worker: WorkerInfo
    text: str


class Fleet:
    """`roles`: those that must be alive for a request to be served."""

    def __init__(
        self,
        *,
        registry: WorkerSource,
        link: Link,
        ledger: Ledger,
        hello: Hello,
        identity: ModelIdentity,
        roles: frozenset[Role],
        observer: RouterObserver,
    ) -> None:
        self.roles = roles
        self._registry = registry
        self._link = link
        self._ledger = ledger
        self._hello = hello
        self._identity = identity
        self._observer = observer
        self._on_room: Callable[[], None] = lambda: None
        self._on_members: Callable[[], None] = lambda: None
        self._registered: dict[str, WorkerInfo] = {}
        self._followed: set[tuple[str, int]] = set()  # (worker id, incarnation)
        self._sessions: dict[str, WorkerSession] = {}
        self._taking: list[WorkerSession] = []
        self._changed = asyncio.Event()  # set and replaced at every change
        self._registry_event = asyncio.Event()  # likewise
        self._log = logging.getLogger("pdserve.router.fleet")

    def listen(self, on_room: Callable[[], None], on_members: Callable[[], None]) -> None:
        """Set the two callbacks: `on_room` is called when room may have appeared, `on_members` before it when
        other workers than before take new requests."""
        self._on_room, self._on_members = on_room, on_members

    async def run(self) -> None:
        """Follow the registry and keep the sessions, until cancelled."""
        async with asyncio.TaskGroup() as tasks, aclosing(self._registry.watch()) as snapshots:
            async for workers in snapshots:
                for worker in self._registry_changed(workers):
                    tasks.create_task(self._follow(worker))

    def place(self, key: AttemptKey, need: Need) -> dict[Role, WorkerSession] | None:
        """Sessions by role, claimed in the ledger; None while some role has no room."""
        chosen = self._ledger.place(key, need)
        return None if chosen is None else {role: self._sessions[worker_id] for role, worker_id in chosen.items()}

    def missing_role(self) -> Role | None:
        """A required role of which no worker takes new requests."""
        return next((role for role in sorted(self.roles, key=_by_name) if not self._ledger.accounts(role)), None)

    def ready(self) -> bool:
        """Whether every required role has a worker that was heard lately and makes progress."""
        fit = {
            session.worker.role
            for session in self._sessions.values()
            if session.account.taking and session.heard_within(_HEARD_SECONDS) and not session.account.load.stuck
        }
        return self.roles <= fit

    async def wait_ready(self) -> None:
        """Returns when `ready`; workers report at least each second, so every change is an event."""
        while not self.ready():
            await self._changed.wait()

    def views(self) -> list[WorkerView]:
        """The live workers, by id."""
        return [
            WorkerView(s.worker, s.account.capacity, s.account.load, s.account.placed, s.account.taking)
            for _, s in sorted(self._sessions.items())
        ]

    def count(self) -> dict[str, int]:
        """Live workers of each required role."""
        sessions = self._sessions.values()
        return {role.value: sum(s.worker.role is role for s in sessions) for role in sorted(self.roles, key=_by_name)}

    async def scrape_all(self) -> list[WorkerScrape]:
        """The metrics of all live workers, asked at once; those that do not answer in time are left out."""
        sessions = [session for _, session in sorted(self._sessions.items())]
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(self._scrape(session.worker)) for session in sessions]
        return [scrape for answer in answers if (scrape := answer.result()) is not None]

    async def _scrape(self, worker: WorkerInfo) -> WorkerScrape | None:
        try:
            return WorkerScrape(worker, await self._link.scrape(worker.address, _SCRAPE_SECONDS))
        except LinkClosed:
            return None

    def _registry_changed(self, workers: list[WorkerInfo]) -> list[WorkerInfo]:
        """Take in a snapshot; the workers that nobody follows yet."""
        self._registered = {worker.id: worker for worker in workers if worker.role in (Role.PREFILL, Role.DECODE)}
        for worker_id, session in self._sessions.items():
            registered = self._registered.get(worker_id)
            if registered is not None and registered.incarnation == session.worker.incarnation:
                session.account.draining = registered.state is WorkerState.DRAINING
        self._registry_event.set()
        self._registry_event = asyncio.Event()
        self._note_change()
        new = [w for w in self._registered.values() if (w.id, w.incarnation) not in self._followed]
        self._followed.update((w.id, w.incarnation) for w in new)
        return new

    async def _follow(self, worker: WorkerInfo) -> None:
        """Keep a session to this life of a worker for as long as the registry names it."""
        backoff = _FIRST_BACKOFF
        try:
            while self._is_registered(worker):
                wait, backoff = backoff, min(2 * backoff, _LAST_BACKOFF)
                try:
                    session = await self._open(worker)
                    await session.run()
                    wait = backoff = _FIRST_BACKOFF
                except (LinkClosed, Stale, Incompatible) as error:
                    self._log.warning("no session to %s worker %s: %s", worker.role.value, worker.id, error)
                except Exception:  # noqa: BLE001 - a fault of one session must not end those of all others
                    self._log.exception("the session to %s worker %s failed", worker.role.value, worker.id)
                await self._registry_change_within(wait)
        finally:
            self._followed.discard((worker.id, worker.incarnation))

    def _is_registered(self, worker: WorkerInfo) -> bool:
        registered = self._registered.get(worker.id)
        return registered is not None and registered.incarnation == worker.incarnation

    async def _open(self, worker: WorkerInfo) -> WorkerSession:
        stream, welcome = await open_stream(self._link, worker, self._hello, self._identity)
        try:
            return self._opened(worker, stream, welcome)
        except BaseException:
            await stream.close()
            raise

    def _opened(
        self, worker: WorkerInfo, stream: Duplex[RouterMessage, WorkerMessage], welcome: Welcome
    ) -> WorkerSession:
        earlier = self._sessions.get(worker.id)
        if earlier is not None:
            earlier.end("a new incarnation took its place")
        account = WorkerAccount(worker.id, worker.role, welcome.capacity, welcome.load)
        registered = self._registered.get(worker.id, welcome.worker)
        account.draining = WorkerState.DRAINING in (registered.state, welcome.worker.state)
        session = WorkerSession(
            worker,
            stream,
            account,
            on_frame=self._note_change,
            on_end=self._session_ended,
            on_dropped=self._observer.dropped_message,
        )
        self._ledger.open(account)
        self._sessions[worker.id] = session
        self._log.info("session to %s worker %s at %s", worker.role.value, worker.id, worker.address)
        self._note_change()
        return session

    def _session_ended(self, session: WorkerSession) -> None:
        del self._sessions[session.worker.id]
        self._ledger.close(session.account)
        self._log.info("session to %s worker %s ended", session.worker.role.value, session.worker.id)
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        taking = [session for session in self._sessions.values() if session.account.taking]
        if taking != self._taking:
            self._taking = taking
            self._on_members()
        self._on_room()

    async def _registry_change_within(self, seconds: float) -> None:
        """Until the registry changes, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._registry_event.wait()
        except TimeoutError:
            return


def _by_name(role: Role) -> str:
    return role.value

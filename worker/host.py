"""Runs one worker: its role, engine, sessions, hand-over, registry entry, and its orderly end.

Composed by cluster/; knows nothing of Ray or of other workers.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from contracts.handover import ExporterMessage, PullerMessage
from contracts.session import RouterMessage, Welcome, WorkerMessage
from contracts.workers import WorkerInfo, WorkerLoad
from engine.loop import EngineLoop
from protos.links.base import Duplex, Link
from shared_state.registry import Registry
from worker.core import WorkerCore
from worker.session_server import Commands, SessionServer


class Role(Commands, Protocol):
    """What a host runs: prefill_workers.worker or decode_workers.worker."""

    @property
    def engine(self) -> EngineLoop: ...

    @property
    def busy(self) -> bool:
        """Whether any attempt is in work."""

    def leases(self) -> int:
        """Exports that hold blocks for a receiver."""

    def load(self) -> WorkerLoad: ...

    async def open(self) -> None:
        """Connect with what moves KV. Raises StartupError."""

    async def close(self) -> None:
        """End what `open` began. Idempotent."""

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        """Serve one stream of a puller until it ends."""


_AUDIT_SECONDS = 1.0
_LEAVE_SECONDS = 1.0
MakeRole = Callable[[WorkerCore, Link, Registry, asyncio.TaskGroup], Role]


class WorkerHost:
    """One worker from start to stop. Implements protos.links.base.Handler."""

    def __init__(self, core: WorkerCore, make_role: MakeRole, link: Link, registry: Registry) -> None:
        self.core = core
        self._make_role = make_role
        self._link = link
        self._registry = registry
        self._role: Role | None = None
        self._sessions: SessionServer | None = None
        self._stop = asyncio.Event()
        self._idle = asyncio.Event()
        self._audit: asyncio.TimerHandle | None = None
        self._audited = -_AUDIT_SECONDS
        self._grace = 0.0
        self._main: asyncio.Task[None] | None = None

    async def start(self) -> WorkerInfo:
        """Serve; returns when others can connect. Raises StartupError."""
        started: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        self._main = asyncio.create_task(self._run(started))
        ends: set[asyncio.Future[Any]] = {self._main, started}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            try:
                await self._main
            except ExceptionGroup as group:  # the task group's; its reason is what the operator must see
                raise group.exceptions[0] from group
        return await started

    async def stop(self, grace: float) -> None:
        """Refuse new work, let running attempts end for up to `grace` seconds, then end them. Idempotent."""
        self._grace = grace
        self._stop.set()
        if self._main is not None:
            await asyncio.wait({self._main})

    async def ended(self) -> None:
        """Returns when the worker serves no more; raises what ended it, unless it was stopped."""
        assert self._main is not None
        await asyncio.shield(self._main)

    async def session(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        """A router's session."""
        assert self._sessions is not None
        await self._sessions.serve(stream)

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        """A decode worker's Pull."""
        assert self._role is not None
        await self._role.pull(stream)

    async def scrape(self) -> str:
        """This worker's metrics."""
        return self.core.figures.exposition()

    async def _run(self, started: "asyncio.Future[WorkerInfo]") -> None:
        core = self.core
        try:
            async with asyncio.TaskGroup() as tasks:
                self._role = role = self._make_role(core, self._link, self._registry, tasks)
                self._sessions = sessions = SessionServer(
                    role, lambda: Welcome(core.info, core.capacity, role.load()), role.load, core.config.cluster.secret
                )
                core.on_change = self._changed
                core.figures.bind(core.blocks.counts, role.load, role.leases)
                stepping = tasks.create_task(role.engine.run())
                await role.open()
                address = await self._link.serve(core.info.address, self)
                core.info = replace(core.info, address=address)
                announcing = tasks.create_task(self._registry.announce(lambda: core.info, role.load))
                started.set_result(core.info)
                await self._stop.wait()
                await self._drain(sessions)
                await self._link.close()
                await role.close()
                stepping.cancel()
                announcing.cancel()
        finally:
            await self._link.close()
            if self._role is not None:
                await self._role.close()
            await core.runner.close()
            if self._audit is not None:
                self._audit.cancel()

    def _changed(self) -> None:
        assert self._role is not None
        assert self._sessions is not None
        self._sessions.load_changed()
        if not self._role.busy and not self.core.busy:
            self._idle.set()
            if self._audit is None:
                # a timer, so that what waits to be written goes first
                self._audit = asyncio.get_running_loop().call_at(self._audited + _AUDIT_SECONDS, self._audit_idle)

    def _audit_idle(self) -> None:
        """At most once in _AUDIT_SECONDS, always after the last change."""
        self._audit = None
        self._audited = asyncio.get_running_loop().time()
        self.core.audit()

    async def _drain(self, sessions: SessionServer) -> None:
        """Refuse what is new and wait for what runs, and until routers were told how it ended."""
        self.core.drain()
        self._idle.clear()
        self._changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await self._idle.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await sessions.left()

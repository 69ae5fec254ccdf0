"""Who is there: workers and routers announce themselves under a lease, others list and watch them.

Every process announces itself; routers watch. A lapsed lease only forbids new sessions: nothing here may
stop what already runs, so an outage of the store is logged once and waited out.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from contracts.workers import WorkerInfo, WorkerLoad
from shared_state.backends.base import Backend, BackendUnavailable
from shared_state.records import decode, encode

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_FIRST_RETRY = 0.1  # seconds; doubles up to the lease


class Registry:
    """The registry of one namespace. `ttl`: seconds that a record outlives its writer; keys are
    pdserve:<namespace>:workers:<id> and pdserve:<namespace>:load:<id>, values JSON.

    `ignored` counts the records that could not be read (each once, until it changes).
    """

    def __init__(self, backend: Backend, namespace: str, ttl: float = 5.0) -> None:
        self._backend = backend
        self._workers = f"pdserve:{namespace}:workers:"
        self._loads = f"pdserve:{namespace}:load:"
        self._ttl = ttl
        self._unread: dict[str, bytes] = {}
        self.ignored = 0

    async def announce(self, describe: Callable[[], WorkerInfo], load: Callable[[], WorkerLoad] | None = None) -> None:
        """Register what `describe` says, and `load` where given, renew it each third of the lease until
        cancelled, then withdraw it. Outages do not end it: the record comes back with the store.

        The withdrawal leaves a record alone that another incarnation has written since.
        """
        written: dict[str, bytes] = {}
        outage = _Outage("announce this process")
        try:
            while True:
                info = describe()
                written[self._workers + info.id] = encode(info)
                if load is not None:
                    written[self._loads + info.id] = encode(load())
                try:
                    for key, value in written.items():
                        await self._backend.put(key, value, self._ttl)
                    outage.over()
                except BackendUnavailable as error:
                    outage.note(error)
                await asyncio.sleep(self._ttl / 3)
        finally:
            try:
                for key, value in written.items():
                    await self._backend.delete(key, value)
            except BackendUnavailable as error:
                outage.note(error)  # the lease lapses by itself

    async def watch(self) -> AsyncGenerator[list[WorkerInfo]]:
        """The workers, sorted by id: at the start and after every change. During an outage nothing new
        comes, the last list stands. Close it (contextlib.aclosing) to give up its subscription."""
        last: list[WorkerInfo] | None = None
        outage = _Outage("watch the registry")
        delay = _FIRST_RETRY
        while True:
            try:
                async with aclosing(self._backend.watch(self._workers)) as changes:
                    async for _ in changes:
                        workers = await self.workers()
                        outage.over()
                        delay = _FIRST_RETRY
                        if workers != last:
                            last = workers
                            yield workers
            except BackendUnavailable as error:
                outage.note(error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._ttl)

    async def workers(self) -> list[WorkerInfo]:
        """The workers that hold a lease, sorted by id. Raises BackendUnavailable."""
        found = await self._read(self._workers, WorkerInfo)
        return [found[name] for name in sorted(found)]

    async def loads(self) -> dict[str, WorkerLoad]:
        """The last load that each worker announced, by id. Raises BackendUnavailable."""
        return await self._read(self._loads, WorkerLoad)

    async def _read(self, directory: str, kind: type[_T]) -> dict[str, _T]:
        found: dict[str, _T] = {}
        for key, value in (await self._backend.list(directory)).items():
            try:
                found[key.removeprefix(directory)] = decode(kind, value)
            except ValueError as error:
                self._ignore(key, value, error)
        return found

    def _ignore(self, key: str, value: bytes, error: ValueError) -> None:
        if self._unread.get(key) != value:
            self._unread[key] = value
            self.ignored += 1
            _log.warning("registry: %s cannot be read and is ignored: %s (%d so far)", key, error, self.ignored)


class _Outage:
    """Logs the start and the end of an outage, once each."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._lasts = False

    def note(self, error: BackendUnavailable) -> None:
        if not self._lasts:
            _log.warning("cannot %s: %s", self._purpose, error)
        self._lasts = True

    def over(self) -> None:
        if self._lasts:
            _log.info("can %s again", self._purpose)
        self._lasts = False

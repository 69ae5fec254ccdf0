"""The links of one puller: a verified one to every exporter that the registry names, set up before it is needed.

The role that pulls owns it and runs `follow`. A worker that has left the registry keeps its link for a while: a
lapsed entry stops nothing that runs.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from contracts.errors import PdserveError
from contracts.session import Source
from contracts.workers import Role, WorkerInfo
from kv_transfer.peer import OpenInlet, Peer, Puller

_log = logging.getLogger(__name__)
_FIRST_RETRY = 0.25
_LAST_RETRY = 5.0


@dataclass(slots=True)
class _Entry:
    """`linking` keeps the link while the registry names the worker; `leaving` runs while it does not."""

    peer: Peer
    linking: asyncio.Task[None] | None = None
    leaving: asyncio.TimerHandle | None = None


class Peers:
    """All links, by source. `on_change` is called when `linked` may have changed."""

    def __init__(self, puller: Puller, tasks: asyncio.TaskGroup, on_change: Callable[[], None]) -> None:
        self._puller = puller
        self._tasks = tasks
        self._on_change = on_change
        self._entries: dict[Source, _Entry] = {}

    @property
    def linked(self) -> bool:
        """Whether the blocks of at least one exporter can be reached."""
        return any(entry.peer.verified for entry in self._entries.values())

    async def inlet(self, source: Source) -> OpenInlet:
        """For one hand-over, also from a worker that the registry does not name (yet). Raises as Peer.inlet."""
        entry = self._entry(source)
        if entry.leaving is not None:
            entry.leaving.cancel()
            entry.leaving = None
            self._leave(source, entry)
        return await entry.peer.inlet()

    async def follow(self, snapshots: AsyncIterator[list[WorkerInfo]]) -> None:
        """Link to the exporters of each snapshot, until cancelled."""
        async for workers in snapshots:
            named = {Source(w.id, w.address, w.incarnation): None for w in workers if w.role is Role.PREFILL}
            for source in named:
                entry = self._entry(source)
                if entry.leaving is not None:
                    entry.leaving.cancel()
                    entry.leaving = None
                if entry.linking is None:
                    entry.linking = self._tasks.create_task(self._link(source, entry.peer))
            for source in [source for source in self._entries if source not in named]:
                self._leave(source, self._entries[source])

    async def close(self) -> None:
        """Break every connection. Idempotent."""
        while self._entries:
            _, entry = self._entries.popitem()
            _stop(entry)
            await entry.peer.close()

    def _entry(self, source: Source) -> _Entry:
        entry = self._entries.get(source)
        if entry is None:
            entry = self._entries[source] = _Entry(Peer(source, self._puller))
            self._leave(source, entry)
        return entry

    def _leave(self, source: Source, entry: _Entry) -> None:
        """It goes when for as long as a lease the registry does not name it and nobody asks for it, no hand-over goes
        over it any more, and it does not answer either: a lapsed entry alone says nothing about a worker that was
        there. One that was never named goes without being asked, and is linked to again when it is needed."""
        if entry.leaving is None:
            seconds = self._puller.config.lease_seconds
            entry.leaving = asyncio.get_running_loop().call_later(seconds, self._ask, source, entry)

    def _ask(self, source: Source, entry: _Entry) -> None:
        self._tasks.create_task(self._retire(source, entry))

    async def _retire(self, source: Source, entry: _Entry) -> None:
        """Unless a worker that was named once is still there, or it has been named or used meanwhile."""
        asked = entry.leaving
        lives = entry.peer.used or (entry.linking is not None and await entry.peer.answers())
        if entry.leaving is not asked or self._entries.get(source) is not entry:
            return
        entry.leaving = None
        if lives:
            self._leave(source, entry)
            return
        del self._entries[source]
        _stop(entry)
        self._on_change()
        await entry.peer.close()

    async def _link(self, source: Source, peer: Peer) -> None:
        delay = _FIRST_RETRY
        while True:
            try:
                await peer.verify()
            except PdserveError as error:
                _log.warning("no link to worker %s: %s", source.worker_id, error)
            except Exception:  # noqa: BLE001 - a fault of one link must not end those of all others
                _log.exception("the link to worker %s failed", source.worker_id)
            else:
                delay = _FIRST_RETRY
                self._on_change()
                await peer.broken()
                self._on_change()
                continue
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY)


def _stop(entry: _Entry) -> None:
    if entry.linking is not None:
        entry.linking.cancel()
    if entry.leaving is not None:
        entry.leaving.cancel()

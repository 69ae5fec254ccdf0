"""Shared values of one process: what tests, the simulator and a cluster in one process use.

All users share one object; leases run on the event loop's clock.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    value: bytes
    lapse: asyncio.TimerHandle


class MemoryStore:
    """shared_state.backends.base.Backend in a dict. Never unavailable."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._watchers: list[tuple[str, asyncio.Event]] = []

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        before = self._entries.get(key)
        if before is not None:
            before.lapse.cancel()
        lapse = asyncio.get_running_loop().call_later(ttl, self._remove, key)
        self._entries[key] = _Entry(value, lapse)
        if before is None or before.value != value:
            self._notify(key)

    async def delete(self, key: str, expected: bytes) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.value == expected:
            entry.lapse.cancel()
            self._remove(key)

    async def list(self, directory: str) -> dict[str, bytes]:
        return {key: entry.value for key, entry in self._entries.items() if key.startswith(directory)}

    async def watch(self, directory: str) -> AsyncGenerator[None]:
        changed = asyncio.Event()
        changed.set()
        watcher = (directory, changed)
        self._watchers.append(watcher)
        try:
            while True:
                await changed.wait()
                changed.clear()
                yield
        finally:
            self._watchers.remove(watcher)

    async def close(self) -> None:
        """Other users of the object go on."""

    def _remove(self, key: str) -> None:
        del self._entries[key]
        self._notify(key)

    def _notify(self, key: str) -> None:
        for directory, changed in self._watchers:
            if key.startswith(directory):
                changed.set()


def create() -> MemoryStore:
    """A new, empty store, to be shared by its users."""
    return MemoryStore()

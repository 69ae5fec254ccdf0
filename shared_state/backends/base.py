"""The seam for small shared values with a lease: memory (one process) and redis.

A plug's module has `create(...)`.
"""

from collections.abc import AsyncIterator
from typing import Protocol


class BackendUnavailable(Exception):
    """The store did not answer in time, or refused; says why. Nothing that runs may stop because of it."""


class Backend(Protocol):
    """Keys are strings, values small byte strings. Every call is bounded by a short timeout."""

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        """Set the value for `ttl` seconds and notify watchers if it was absent or differs."""

    async def delete(self, key: str) -> None:
        """Remove the value and notify watchers."""

    async def list(self, prefix: str) -> dict[str, bytes]:
        """All live values below a prefix."""

    def watch(self, prefix: str) -> AsyncIterator[None]:
        """Yields once at the start and after each change below the prefix (several may fall together).
        Raises BackendUnavailable when the connection is lost."""

    async def close(self) -> None: ...

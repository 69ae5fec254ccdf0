"""The seam for small shared values with a lease: memory (one process) and redis.

Keys are `<directory><name>`: a directory ends in ":", a name has none. A plug's module has `create(...)`.
"""

from collections.abc import AsyncGenerator
from typing import Protocol


class BackendUnavailable(Exception):
    """The store did not answer in time, or refused; says why. Nothing that runs may stop because of it."""


class Backend(Protocol):
    """Values are small byte strings. Every call but `watch` is bounded by a short timeout, and raises
    BackendUnavailable."""

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        """Set the value for `ttl` seconds and notify watchers if it was absent or differs."""

    async def delete(self, key: str, expected: bytes) -> None:
        """Remove the value if it is `expected`, so that nobody removes what another has written since,
        and notify watchers."""

    async def list(self, directory: str) -> dict[str, bytes]:
        """All live values of a directory, by key."""

    def watch(self, directory: str) -> AsyncGenerator[None]:
        """Yields once at the start and after each change in the directory, lapsed leases included
        (several may fall together, and it may yield without a change). Raises BackendUnavailable when
        the connection is lost."""

    async def close(self) -> None: ...

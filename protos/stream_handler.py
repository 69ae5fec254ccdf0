"""Runs a process's handler on one stream; the serving side of every link.

It is the one place where a handler's failure turns into a broken stream. Links call it as a task.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from protos.links.base import LinkClosed

_log = logging.getLogger(__name__)


class Breakable(Protocol):
    """What the end of a handler does to its stream."""

    async def close(self) -> None:
        """See Duplex."""

    def break_off(self, reason: str) -> None:
        """The stream ends here at once; both ends get LinkClosed with `reason`. Idempotent."""


StreamT = TypeVar("StreamT", bound=Breakable)


async def run_handler(handler: Callable[[StreamT], Awaitable[None]], stream: StreamT) -> None:
    """Until the handler ends; then the stream ends: in order when it returned, else broken."""
    try:
        await handler(stream)
    except LinkClosed as closed:
        stream.break_off(str(closed))
    except Exception as error:  # noqa: BLE001  whatever it is, the log and the other end must learn it
        _log.exception("the handler of a stream failed")
        stream.break_off(f"the handler failed: {error!r}")
    finally:
        await stream.close()

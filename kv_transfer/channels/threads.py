"""The threads of one transport, which move and hash blocks beside the event loop.

numpy and xxhash work without the GIL on large pieces. Nobody who waits for a job returns before it has ended, as until
then it may write into the pool.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from protos.links.base import LinkClosed

T = TypeVar("T")


class Threads:
    """At most `most` of them, made as they are needed; further jobs wait."""

    def __init__(self, name: str, most: int) -> None:
        self.closed = False
        self._executor = ThreadPoolExecutor(most, thread_name_prefix=f"pdserve-{name}")
        self._jobs: set[asyncio.Future[Any]] = set()

    async def run(self, job: Callable[[], T], stop: Callable[[], object] | None = None) -> T:
        """The job's result. Cancelling a job that has not begun drops it; one that has begun is told by `stop` to end
        early (None: it ends by itself, in milliseconds), and `run` returns when it has. Raises LinkClosed when the
        threads are closed."""
        if self.closed:
            raise LinkClosed("this transport is closed")
        submitted, future = self._submit(job)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError as error:
                cancelled = error
                if not submitted.cancel() and stop is not None:
                    stop()
        if cancelled is None:
            return future.result()
        if not future.cancelled():
            future.exception()  # nobody waits for it any more
        raise cancelled

    def start(self, job: Callable[[], object]) -> None:
        """A job that nobody waits for but `close`. The loop's exception handler hears its error."""
        self._submit(job)

    async def close(self) -> None:
        """No thread is left when it returns: once the last job has ended, and the caller has seen to it that this is
        soon. Idempotent."""
        self.closed = True
        if self._jobs:
            await asyncio.wait(self._jobs)
        self._executor.shutdown()  # of threads that have nothing to do

    def _submit(self, job: Callable[[], T]) -> tuple[Future[T], asyncio.Future[T]]:
        submitted = self._executor.submit(job)
        future = asyncio.wrap_future(submitted)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        return submitted, future

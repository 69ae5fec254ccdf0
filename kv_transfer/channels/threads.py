"""The threads of one transport, which move and hash blocks beside the event loop.

numpy and xxhash work without the GIL on large pieces. Nobody who waits for a job returns before it has ended, as until
then it may write into the pool.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from protos.links.base import LinkClosed

T = TypeVar("T")


class Threads:
    """At most `most` of them, made as they are needed; further jobs wait."""

    def __init__(self, name: str, most: int) -> None:
        self.closed = False
        self._executor = ThreadPoolExecutor(most, thread_name_prefix=f"pdserve-{name}")

    async def run(self, job: Callable[[], T], stop: Callable[[], object] | None = None) -> T:
        """The job's result. Cancelling calls `stop`, which makes the job end early, and returns when it has ended;
        None: it ends by itself, in milliseconds. Raises LinkClosed when the threads are closed."""
        if self.closed:
            raise LinkClosed("this transport is closed")
        future = asyncio.get_running_loop().run_in_executor(self._executor, job)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError as error:
                cancelled = error
                if stop is not None:
                    stop()
        if cancelled is not None:
            future.exception()  # nobody waits for it any more
            raise cancelled
        return future.result()

    def close(self) -> None:
        """Blocks until the last job has ended: the caller has seen to it that this is soon. Idempotent."""
        self.closed = True
        self._executor.shutdown()

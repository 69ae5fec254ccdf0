"""Jobs beside the loop: who waits for what, and that closing holds up nobody."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from kv_transfer.channels.threads import Threads
from protos.links.base import LinkClosed


class Job:
    """Runs until it may leave."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.inside = asyncio.Event()
        self.leave = threading.Event()
        self.ended = False

    def __call__(self) -> str:
        self.loop.call_soon_threadsafe(self.inside.set)
        self.leave.wait()
        self.ended = True
        return "done"


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    """One thread."""
    threads = Threads("test", 1)
    yield threads
    await threads.close()


async def test_a_job_that_has_begun_is_waited_for_and_one_that_has_not_is_dropped(threads: Threads) -> None:
    first, second, stopped = Job(), Job(), list[str]()
    running = asyncio.create_task(threads.run(first, lambda: stopped.append("first")))
    await first.inside.wait()
    waiting = asyncio.create_task(threads.run(second, lambda: stopped.append("second")))
    await asyncio.sleep(0)
    for task in (running, waiting):
        task.cancel()
    done, _ = await asyncio.wait({waiting, running}, timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
    first.leave.set()
    second.leave.set()
    assert done == {waiting}
    assert waiting.cancelled()
    assert stopped == ["first"]
    with pytest.raises(asyncio.CancelledError):
        await running
    assert first.ended
    assert not second.inside.is_set()
    assert await threads.run(lambda: "next") == "next"


async def test_the_loop_goes_on_while_the_threads_close(threads: Threads) -> None:
    job = Job()
    running = asyncio.create_task(threads.run(job))
    await job.inside.wait()
    closing = asyncio.create_task(threads.close())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not closing.done()
    with pytest.raises(LinkClosed, match="closed"):
        await threads.run(lambda: None)
    job.leave.set()
    await closing
    await threads.close()
    assert await running == "done"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pdserve-test")]


async def test_close_waits_for_what_nobody_waits_for(threads: Threads) -> None:
    job = Job()
    threads.start(job)
    await job.inside.wait()
    closing = asyncio.create_task(threads.close())
    await asyncio.sleep(0)
    assert not closing.done()
    job.leave.set()
    await closing
    assert job.ended


async def test_a_job_that_fails_while_it_is_cancelled_ends_cancelled(threads: Threads) -> None:
    job = Job()

    def fail() -> None:
        job()
        raise ValueError("nobody hears it")

    running = asyncio.create_task(threads.run(fail))
    await job.inside.wait()
    running.cancel()
    await asyncio.sleep(0)
    job.leave.set()
    with pytest.raises(asyncio.CancelledError):
        await running

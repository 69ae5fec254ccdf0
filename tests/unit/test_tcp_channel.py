"""One channel: nobody returns while a thread is in its socket, and the socket is closed when none is."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from kv_transfer.channels.tcp_channel import TcpChannel, receive_into
from kv_transfer.channels.threads import Threads
from protos.links.base import LinkClosed


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    threads = Threads("test", 4)
    yield threads
    await threads.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


class Job:
    """Waits for a byte that never comes; then takes its time to leave."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.inside = asyncio.Event()
        self.ending = asyncio.Event()
        self.leave = threading.Event()
        self.ended = False

    def __call__(self, sock: socket.socket) -> None:
        self.loop.call_soon_threadsafe(self.inside.set)
        try:
            receive_into(sock, memoryview(bytearray(1)))
        finally:
            self.loop.call_soon_threadsafe(self.ending.set)
            self.leave.wait()
            self.ended = sock.fileno() != -1


async def test_a_cancelled_job_has_ended_when_run_returns(
    threads: Threads, ends: tuple[socket.socket, socket.socket]
) -> None:
    broken: list[TcpChannel] = []
    channel = TcpChannel(b"", ends[0], threads, broken.append)
    job = Job()
    running = asyncio.create_task(channel.run(job))
    await job.inside.wait()
    running.cancel()
    await job.ending.wait()  # the socket woke it
    running.cancel()  # once more does not help
    await asyncio.sleep(0)
    assert not running.done()
    job.leave.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert job.ended  # and its socket was open until then
    assert ends[0].fileno() == -1
    assert broken == [channel]
    assert ends[1].recv(1) == b""


async def test_breaking_off_ends_a_job_and_whoever_waits_for_its_turn(
    threads: Threads, ends: tuple[socket.socket, socket.socket]
) -> None:
    channel = TcpChannel(b"", ends[0], threads, lambda _: None)
    job = Job()
    job.leave.set()
    running = [asyncio.create_task(channel.run(job)) for _ in range(2)]
    await job.inside.wait()
    channel.break_off()
    channel.break_off()
    assert ends[0].fileno() != -1
    for task in running:
        with pytest.raises(LinkClosed):
            await task
    assert ends[0].fileno() == -1
    with pytest.raises(LinkClosed, match="broken"):
        await channel.run(job)


async def test_a_job_that_fails_breaks_the_channel(threads: Threads, ends: tuple[socket.socket, socket.socket]) -> None:
    channel = TcpChannel(b"", ends[0], threads, lambda _: None)

    def fail(_: socket.socket) -> None:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        await channel.run(fail)
    assert not channel.usable


@pytest.mark.parametrize("usable", [True, False])
async def test_one_with_bytes_in_it_is_not_usable(
    threads: Threads, ends: tuple[socket.socket, socket.socket], usable: bool
) -> None:
    channel = TcpChannel(b"", ends[0], threads, lambda _: None)
    if not usable:
        ends[1].sendall(b"x")
    assert channel.usable is usable
    channel.break_off()
    assert not channel.usable


async def test_watched_it_breaks_when_the_other_end_does(
    threads: Threads, ends: tuple[socket.socket, socket.socket]
) -> None:
    broken: asyncio.Queue[TcpChannel] = asyncio.Queue()
    channel = TcpChannel(b"", ends[0], threads, broken.put_nowait)
    channel.watch()
    ends[1].close()
    async with asyncio.timeout(20):
        assert await broken.get() is channel
    assert ends[0].fileno() == -1

"""Every plug of the link seam carries sessions, pulls and scrapes alike."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from contracts.handover import Abandon, Ack, Alive, Chunk, ExporterMessage, Progress
from contracts.requests import AttemptKey
from contracts.session import Cancel
from protos.links.base import Link, LinkClosed
from tests.helpers.links import MIB, ExporterEnd, Process, WorkerEnd, cancel, frame, serve


async def test_messages_arrive_in_order_in_both_directions_at_once(make_link: Callable[[], Link]) -> None:
    count = 200
    got: list[int] = []

    async def both_ways(stream: WorkerEnd) -> None:
        async def send() -> None:
            for number in range(count):
                await stream.send(frame(number))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            while (message := await stream.receive()) is not None:
                assert isinstance(message, Cancel)
                got.append(message.key.attempt)

    address = await serve(make_link(), Process(both_ways))
    stream = await make_link().open_session(address)

    async def send() -> None:
        for number in range(count):
            await stream.send(cancel(number))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        received = [await stream.receive() for _ in range(count)]
    await stream.close()
    assert received == [frame(number) for number in range(count)]
    assert got == list(range(count))


async def test_ten_thousand_small_messages(make_link: Callable[[], Link]) -> None:
    count = 10_000

    async def flood(stream: WorkerEnd) -> None:
        for number in range(count):
            await stream.send(frame(number))

    stream = await make_link().open_session(await serve(make_link(), Process(flood)))
    for number in range(count):
        assert await stream.receive() == frame(number)
    assert await stream.receive() is None
    assert await stream.receive() is None
    await stream.close()


async def test_large_chunks_arrive_whole(make_link: Callable[[], Link]) -> None:
    chunks = [Chunk(number, 1, (number,), bytes([number]) * (3 * MIB)) for number in range(5)]
    acknowledged = asyncio.Event()

    async def export(stream: ExporterEnd) -> None:
        assert await stream.receive() == Alive()
        for chunk in chunks:
            await stream.send(chunk)
        assert await stream.receive() == Ack()
        acknowledged.set()

    stream = await make_link().open_pull(await serve(make_link(), Process(on_pull=export)))
    await stream.send(Alive())
    for chunk in chunks:
        assert await stream.receive() == chunk
    await stream.send(Ack())
    await acknowledged.wait()
    await stream.close()


async def test_a_sender_waits_when_the_receiver_does_not_read(make_link: Callable[[], Link]) -> None:
    total = 256
    sent = 0
    progress = asyncio.Event()

    async def export(stream: ExporterEnd) -> None:
        nonlocal sent
        for _ in range(total):
            await stream.send(Chunk(0, 1, (0,), bytes(MIB)))
            sent += 1
            progress.set()

    stream = await make_link().open_pull(await serve(make_link(), Process(on_pull=export)))
    await stream.send(Alive())
    with contextlib.suppress(TimeoutError):
        while sent < total:
            progress.clear()
            async with asyncio.timeout(0.5):
                await progress.wait()
    assert 0 < sent < total // 4
    for _ in range(total):
        assert isinstance(await stream.receive(), Chunk)
    assert await stream.receive() is None
    assert sent == total
    await stream.close()


async def test_cancelling_a_receive_or_send_leaves_the_stream_whole(make_link: Callable[[], Link]) -> None:
    go = asyncio.Event()
    read = asyncio.Event()
    done = asyncio.Event()
    got: list[int] = []

    async def later(stream: WorkerEnd) -> None:
        await go.wait()
        await stream.send(frame(1))
        await stream.send(frame(2))
        await read.wait()
        while (message := await stream.receive()) is not None:
            assert isinstance(message, Cancel)
            got.append(message.key.attempt)
        done.set()

    stream = await make_link().open_session(await serve(make_link(), Process(later)))
    for turns in range(8):
        waiting = asyncio.create_task(stream.receive())
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    go.set()
    assert await stream.receive() == frame(1)
    assert await stream.receive() == frame(2)

    accepted = 0
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0.5):
                await stream.send(Cancel(AttemptKey("1-1", accepted), "x" * MIB))
            accepted += 1
    read.set()
    await stream.send(cancel(9_999))
    await stream.close()
    await done.wait()
    assert got[:accepted] == list(range(accepted))
    assert got[-1] == 9_999
    assert len(got) - accepted in (1, 2)  # the message whose send was cancelled may have gone out


async def test_scrape(make_link: Callable[[], Link]) -> None:
    address = await serve(make_link(), Process(metrics="up 1\n" * 2_000_000))
    assert await make_link().scrape(address, timeout=30) == "up 1\n" * 2_000_000


async def test_a_scrape_that_is_not_answered_times_out(make_link: Callable[[], Link]) -> None:
    process = Process(may_scrape=asyncio.Event())
    address = await serve(make_link(), process)
    with pytest.raises(LinkClosed, match=r"did not answer in 0\.3 s"):
        await make_link().scrape(address, timeout=0.3)
    assert process.scraped.is_set()


async def test_a_scrape_that_fails_is_a_closed_link(
    make_link: Callable[[], Link], caplog: pytest.LogCaptureFixture
) -> None:
    @dataclass
    class Failing(Process):
        async def scrape(self) -> str:
            raise ZeroDivisionError("on purpose")

    address = await serve(make_link(), Failing())
    with pytest.raises(LinkClosed, match="on purpose"):
        await make_link().scrape(address, timeout=30)
    assert "on purpose" in caplog.text


async def test_many_streams_share_a_link(make_link: Callable[[], Link]) -> None:
    async def export(stream: ExporterEnd) -> None:
        message = await stream.receive()
        assert isinstance(message, Abandon)
        for number in range(20):
            await stream.send(Progress(int(message.reason), number))

    async def pull(number: int) -> list[ExporterMessage | None]:
        stream = await client.open_pull(address)
        await stream.send(Abandon(str(number)))
        got = [await stream.receive() for _ in range(21)]
        await stream.close()
        return got

    client = make_link()
    address = await serve(make_link(), Process(on_pull=export))
    async with asyncio.TaskGroup() as tasks:
        pulls = [tasks.create_task(pull(number)) for number in range(32)]
    for number, task in enumerate(pulls):
        assert task.result() == [*(Progress(number, step) for step in range(20)), None]

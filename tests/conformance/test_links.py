"""Every plug of the link seam carries sessions, pulls and scrapes alike."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from contracts.errors import StartupError
from contracts.handover import Abandon, Ack, Alive, Chunk, ExporterMessage, Progress, PullerMessage
from contracts.requests import AttemptKey
from contracts.seams import load_plug, plugs
from contracts.session import Cancel, RouterMessage, WorkerFrame, WorkerMessage
from contracts.workers import WorkerLoad
from protos.links.base import Duplex, Link, LinkClosed
from protos.memory_network import MemoryNetwork

WorkerEnd = Duplex[WorkerMessage, RouterMessage]
ExporterEnd = Duplex[ExporterMessage, PullerMessage]
MIB = 1 << 20


async def echo(stream: WorkerEnd) -> None:
    """Answers the cancel of attempt n with a frame whose load counts n running sequences."""
    while (message := await stream.receive()) is not None:
        assert isinstance(message, Cancel)
        await stream.send(frame(message.key.attempt))


async def no_pull(stream: ExporterEnd) -> None:
    raise AssertionError("no pull was expected")


@dataclass
class Process:
    """A handler made of functions."""

    on_session: Callable[[WorkerEnd], Awaitable[None]] = echo
    on_pull: Callable[[ExporterEnd], Awaitable[None]] = no_pull
    metrics: str = "up 1\n"
    scraped: asyncio.Event = field(default_factory=asyncio.Event)
    may_scrape: asyncio.Event | None = None

    async def session(self, stream: WorkerEnd) -> None:
        await self.on_session(stream)

    async def pull(self, stream: ExporterEnd) -> None:
        await self.on_pull(stream)

    async def scrape(self) -> str:
        self.scraped.set()
        if self.may_scrape is not None:
            await self.may_scrape.wait()
        return self.metrics


def cancel(number: int) -> Cancel:
    return Cancel(AttemptKey("1-1", number), "test")


def frame(number: int) -> WorkerFrame:
    return WorkerFrame(WorkerLoad(free_blocks=0, free_slots=0, backlog_tokens=0, running=number, waiting=0))


async def send_for_ever(stream: Duplex[RouterMessage, WorkerMessage]) -> None:
    while True:
        await stream.send(cancel(1))


@pytest.fixture(params=plugs("link"))
async def make_link(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[], Link]]:
    """Makes links that can reach each other; closes them, and checks that they leave no task behind."""
    plug = load_plug("link", request.param)
    arguments = {"memory": (MemoryNetwork(),)}.get(request.param, ())
    links: list[Link] = []

    def make() -> Link:
        links.append(plug.create(*arguments))
        return links[-1]

    yield make
    for link in links:
        await link.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=5)
    assert not left


async def serve(link: Link, process: Process) -> str:
    return await link.serve("127.0.0.1:0", process)


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


async def test_an_orderly_close_delivers_what_was_sent_and_then_none(make_link: Callable[[], Link]) -> None:
    ends: asyncio.Queue[object] = asyncio.Queue()

    async def listen(stream: ExporterEnd) -> None:
        while (message := await stream.receive()) is not None:
            ends.put_nowait(message)
        ends.put_nowait(await stream.receive())

    stream = await make_link().open_pull(await serve(make_link(), Process(on_pull=listen)))
    await stream.send(Abandon("tired"))
    await stream.close()
    await stream.close()
    assert await ends.get() == Abandon("tired")
    assert await ends.get() is None
    with pytest.raises(LinkClosed):
        await stream.send(Alive())
    with pytest.raises(LinkClosed):
        await stream.receive()


async def test_the_serving_end_may_close_first(make_link: Callable[[], Link]) -> None:
    finish = asyncio.Event()

    async def leave(stream: WorkerEnd) -> None:
        await stream.send(frame(1))
        await stream.close()
        await finish.wait()

    stream = await make_link().open_session(await serve(make_link(), Process(leave)))
    assert await stream.receive() == frame(1)
    assert await stream.receive() is None
    with pytest.raises(LinkClosed):
        await send_for_ever(stream)
    finish.set()
    await stream.close()


async def test_what_was_sent_before_the_end_can_be_read_after_it(make_link: Callable[[], Link]) -> None:
    ended = asyncio.Event()

    async def brief(stream: WorkerEnd) -> None:
        await stream.send(frame(1))
        await stream.send(frame(2))
        await stream.close()
        ended.set()

    client = make_link()
    address = await serve(make_link(), Process(brief))
    stream = await client.open_session(address)
    await ended.wait()
    assert await client.scrape(address, timeout=30)  # so that the end has crossed the wire too
    assert [await stream.receive() for _ in range(3)] == [frame(1), frame(2), None]
    await stream.close()


async def test_an_open_that_is_cancelled_leaves_nothing(make_link: Callable[[], Link]) -> None:
    client = make_link()
    address = await serve(make_link(), Process())
    for turns in range(12):
        opening = asyncio.create_task(client.open_session(address))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).close()
    stream = await client.open_session(address)
    await stream.send(cancel(7))
    assert await stream.receive() == frame(7)
    await stream.close()


async def test_a_closed_link_breaks_its_streams_at_the_other_end(make_link: Callable[[], Link]) -> None:
    server = make_link()
    stream = await make_link().open_session(await serve(server, Process()))
    await stream.send(cancel(1))
    assert await stream.receive() == frame(1)
    waiting = asyncio.create_task(stream.receive())
    await server.close()
    with pytest.raises(LinkClosed):
        await waiting
    with pytest.raises(LinkClosed):
        await stream.receive()
    with pytest.raises(LinkClosed):
        await stream.send(cancel(2))
    await stream.close()


async def test_a_client_whose_link_closes_breaks_the_handlers_stream(make_link: Callable[[], Link]) -> None:
    ends: asyncio.Queue[str] = asyncio.Queue()

    async def listen(stream: WorkerEnd) -> None:
        try:
            while await stream.receive() is not None:
                ends.put_nowait("message")
            ends.put_nowait("orderly")
        except LinkClosed:
            ends.put_nowait("broken")
            raise

    client = make_link()
    stream = await client.open_session(await serve(make_link(), Process(listen)))
    await stream.send(cancel(1))
    assert await ends.get() == "message"
    await client.close()
    assert await ends.get() == "broken"
    with pytest.raises(LinkClosed):
        await stream.receive()


async def test_a_handler_that_raises_breaks_the_stream_and_is_logged(
    make_link: Callable[[], Link], caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(stream: WorkerEnd) -> None:
        raise ZeroDivisionError("on purpose")

    stream = await make_link().open_session(await serve(make_link(), Process(fail)))
    with pytest.raises(LinkClosed, match="on purpose"):
        await stream.receive()
    await stream.close()
    assert "on purpose" in caplog.text


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


async def test_nobody_answers(make_link: Callable[[], Link]) -> None:
    server, client = make_link(), make_link()
    address = await serve(server, Process())
    await server.close()
    with pytest.raises(LinkClosed):
        await client.open_session(address)
    with pytest.raises(LinkClosed):
        await client.open_pull(address)
    with pytest.raises(LinkClosed):
        await client.scrape(address, timeout=30)


async def test_a_restarted_process_is_reached_at_the_same_address(make_link: Callable[[], Link]) -> None:
    client = make_link()
    address = "127.0.0.1:0"
    for life in range(3):
        server = make_link()
        address = await server.serve(address, Process())
        stream = await client.open_session(address)
        await stream.send(cancel(life))
        assert await stream.receive() == frame(life)
        await server.close()
        with pytest.raises(LinkClosed):
            await stream.receive()
        await stream.close()
        with pytest.raises(LinkClosed):
            await client.open_session(address)


async def test_an_address_in_use_is_refused_in_one_line(make_link: Callable[[], Link]) -> None:
    address = await serve(make_link(), Process())
    with pytest.raises(StartupError, match="already in use") as refused:
        await make_link().serve(address, Process())
    assert address in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_close_twice_and_open_afterwards(make_link: Callable[[], Link]) -> None:
    link = make_link()
    address = await serve(link, Process())
    await link.close()
    await link.close()
    with pytest.raises(LinkClosed):
        await link.open_session(address)


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

"""Every plug of the link seam opens, closes and breaks alike."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from contracts.errors import StartupError
from contracts.handover import Abandon, Alive
from protos.links.base import Link, LinkClosed
from tests.helpers.links import ExporterEnd, Process, WorkerEnd, cancel, frame, send_for_ever, serve


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


async def test_a_close_is_orderly_although_a_receive_was_cancelled(make_link: Callable[[], Link]) -> None:
    """The other end has nothing to say until it hears that this one has closed."""
    ends: asyncio.Queue[object] = asyncio.Queue()

    async def listen(stream: WorkerEnd) -> None:
        try:
            ends.put_nowait(await stream.receive())
        except LinkClosed as broken:
            ends.put_nowait(broken)

    stream = await make_link().open_session(await serve(make_link(), Process(listen)))
    waiting = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    await stream.close()
    assert await ends.get() is None


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

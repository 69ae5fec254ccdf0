"""Faults that a memory network injects: kill and freeze."""

import asyncio

import pytest

from contracts.handover import Abandon, Alive, ExporterMessage, Progress, PullerMessage
from contracts.session import RouterMessage, WorkerMessage
from protos.links import memory
from protos.links.base import Duplex, LinkClosed
from protos.memory_network import QUEUE_MESSAGES, MemoryNetwork


class Exporter:
    """Sends one Progress for each message that it gets; remembers what it got and how the stream ended."""

    def __init__(self) -> None:
        self.got: list[PullerMessage] = []
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def session(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        raise AssertionError("no session was expected")

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        try:
            while (message := await stream.receive()) is not None:
                self.got.append(message)
                await stream.send(Progress(len(self.got), 0))
            self.ended.put_nowait("orderly")
        except LinkClosed as closed:
            self.ended.put_nowait(str(closed))

    async def scrape(self) -> str:
        return "up 1\n"


async def settle() -> None:
    """Lets every task that can run do so."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_kill_breaks_both_ends_of_what_it_serves_and_of_what_it_opened() -> None:
    network = MemoryNetwork()
    left, right = Exporter(), Exporter()
    left_link, right_link = memory.create(network), memory.create(network)
    await left_link.serve("left", left)
    await right_link.serve("right", right)
    to_right = await left_link.open_pull("right")
    to_left = await right_link.open_pull("left")
    await to_right.send(Alive())
    assert await to_right.receive() == Progress(1, 0)

    network.kill("left")

    for stream in (to_right, to_left):
        with pytest.raises(LinkClosed, match="left was killed"):
            await stream.receive()
        with pytest.raises(LinkClosed, match="left was killed"):
            await stream.send(Alive())
        await stream.close()
    assert await left.ended.get() == "left was killed"
    assert await right.ended.get() == "left was killed"
    with pytest.raises(LinkClosed, match="nobody answers at left"):
        await right_link.open_pull("left")
    with pytest.raises(LinkClosed, match="nobody answers at left"):
        await right_link.scrape("left", 1)

    second = memory.create(network)
    await second.serve("left", Exporter())
    again = await right_link.open_pull("left")
    await again.send(Alive())
    assert await again.receive() == Progress(1, 0)
    for link in (left_link, right_link, second):
        await link.close()


async def test_kill_loses_what_is_in_flight() -> None:
    network = MemoryNetwork()
    exporter = Exporter()
    server, client = memory.create(network), memory.create(network)
    await server.serve("a", exporter)
    stream = await client.open_pull("a")
    await stream.send(Alive())
    network.kill("a")
    assert await exporter.ended.get() == "a was killed"
    assert exporter.got == []
    await server.close()
    await client.close()


async def test_frozen_endpoint_holds_messages_in_both_directions_until_it_thaws() -> None:
    network = MemoryNetwork()
    exporter = Exporter()
    server, client = memory.create(network), memory.create(network)
    await server.serve("a", exporter)
    stream = await client.open_pull("a")
    await stream.send(Alive())
    await settle()
    network.freeze("a")  # the answer to Alive is on its way
    answer = asyncio.create_task(stream.receive())
    for number in range(QUEUE_MESSAGES):
        await stream.send(Abandon(str(number)))
    blocked = asyncio.create_task(stream.send(Abandon("last")))
    scrape = asyncio.create_task(client.scrape("a", 60))
    await settle()
    assert not answer.done()
    assert not blocked.done()
    assert not scrape.done()
    assert exporter.got == [Alive()]

    network.thaw("a")
    assert await answer == Progress(1, 0)
    await blocked
    assert await scrape == "up 1\n"
    for number in range(QUEUE_MESSAGES + 1):
        assert await stream.receive() == Progress(number + 2, 0)
    await stream.close()
    assert await exporter.ended.get() == "orderly"
    assert exporter.got[1:] == [*(Abandon(str(number)) for number in range(QUEUE_MESSAGES)), Abandon("last")]
    await server.close()
    await client.close()


async def test_frozen_endpoint_can_be_killed() -> None:
    network = MemoryNetwork()
    server, client = memory.create(network), memory.create(network)
    await server.serve("a", Exporter())
    stream = await client.open_pull("a")
    network.freeze("a")
    answer = asyncio.create_task(stream.receive())
    scrape = asyncio.create_task(client.scrape("a", 60))
    await settle()
    network.kill("a")
    with pytest.raises(LinkClosed, match="a was killed"):
        await answer
    with pytest.raises(LinkClosed, match="nobody answers"):
        await scrape
    await server.close()
    await client.close()


async def test_an_end_is_held_too_while_frozen() -> None:
    network = MemoryNetwork()
    exporter = Exporter()
    server, client = memory.create(network), memory.create(network)
    await server.serve("a", exporter)
    stream = await client.open_pull("a")
    await settle()
    network.freeze("a")
    await stream.close()
    await settle()
    assert exporter.ended.empty()
    network.thaw("a")
    assert await exporter.ended.get() == "orderly"
    await server.close()
    await client.close()

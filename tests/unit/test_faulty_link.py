"""Each fault on a link does what it says, and nothing else is lost or changed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from contracts.handover import Ack, Alive, Chunk, ExporterMessage, Last, Progress, PullerMessage
from contracts.session import RouterMessage, WorkerMessage
from protos.links.base import Duplex, LinkClosed
from protos.links.memory import create
from protos.memory_network import MemoryNetwork
from simulator.fault_plan import Fault, FaultPlan
from simulator.fault_points import Action, Moment, Place, Point
from simulator.faulty_link import FaultyLink
from simulator.virtual_time import run

CHUNK = Chunk(0, 2, (11, 12), bytes(16))


class Recorded:
    """What a process was told to suffer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def kill(self, seconds: float) -> None:
        self.calls.append(("kill", seconds))

    def freeze(self, seconds: float) -> None:
        self.calls.append(("freeze", seconds))

    def leave(self, request_id: str) -> None:
        self.calls.append(("leave", request_id))


class Exporter:
    """Serves one pull stream by hand."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[Duplex[ExporterMessage, PullerMessage]] = asyncio.Queue()
        self.done = asyncio.Event()

    async def session(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        raise AssertionError("nobody opens one")

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        self.streams.put_nowait(stream)
        await self.done.wait()

    async def scrape(self) -> str:
        return "figures"


class Pair:
    """Both ends of a stream whose exporter has a faulty link."""

    def __init__(
        self, near: Duplex[ExporterMessage, PullerMessage], far: Duplex[PullerMessage, ExporterMessage]
    ) -> None:
        self.near = near
        self.far = far
        self.process = Recorded()

    async def through(self, *messages: ExporterMessage) -> list[ExporterMessage]:
        """What arrives of these."""
        for message in messages:
            await self.near.send(message)
        await self.near.close()
        came: list[ExporterMessage] = []
        while (arrived := await self.far.receive()) is not None:
            came.append(arrived)
        return came


@asynccontextmanager
async def pair(fault: Fault) -> AsyncIterator[Pair]:
    network, exporter, process = MemoryNetwork(), Exporter(), Recorded()
    serving, opening = FaultyLink(create(network), FaultPlan([fault]), process), create(network)
    address = await serving.serve("exporter:0", exporter)
    far = await opening.open_pull(address)
    both = Pair(await exporter.streams.get(), far)
    both.process = process
    assert await opening.scrape(address, 1.0) == "figures"
    yield both
    exporter.done.set()
    await far.close()
    await opening.close()
    await serving.close()


def before(point: Point, action: Action, seconds: float = 0.0, draw: int = 0) -> Fault:
    return Fault(Place(point, Moment.BEFORE), 1, action, seconds, draw)


@pytest.mark.parametrize(
    ("action", "come"),
    [
        (Action.DROP, [0, 2]),
        (Action.DUPLICATE, [0, 1, 1, 2]),
        (Action.REORDER, [0, 2, 1]),
        (Action.DELAY, [0, 1, 2]),
    ],
)
def test_messages_are_lost_doubled_swapped_or_late(action: Action, come: list[int]) -> None:
    async def main() -> None:
        sent: list[ExporterMessage] = [Progress(1, 0), CHUNK, Progress(2, 0)]
        async with pair(before(Point.FIRST_FRAME, action, seconds=3.0)) as both:
            assert await both.through(*sent) == [sent[index] for index in come]
            assert asyncio.get_running_loop().time() == (3.0 if action is Action.DELAY else 0.0)

    run(main())


def test_a_message_that_would_be_passed_by_one_that_never_comes_is_lost() -> None:
    async def main() -> None:
        async with pair(before(Point.FIRST_FRAME, Action.REORDER)) as both:
            assert await both.through(CHUNK) == []

    run(main())


def test_two_senders_keep_their_order_behind_a_late_message() -> None:
    async def main() -> None:
        async with pair(before(Point.FIRST_FRAME, Action.DELAY, seconds=1.0)) as both:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(both.near.send(CHUNK))
                tasks.create_task(both.near.send(Progress(1, 0)))
            assert await both.through() == [CHUNK, Progress(1, 0)]

    run(main())


@pytest.mark.parametrize("draw", [0, 9, 127, 128, 191, 192, 255, 256 + 9, 2**32 - 1])
def test_one_bit_of_a_chunk_or_of_a_digest_is_flipped(draw: int) -> None:
    async def main() -> None:
        async with pair(before(Point.FIRST_FRAME, Action.CORRUPT, draw=draw)) as both:
            (came,) = await both.through(CHUNK)
            assert isinstance(came, Chunk)
            assert _bits(came) ^ _bits(CHUNK) == 1 << draw % 256
        async with pair(before(Point.LAST, Action.CORRUPT, draw=draw)) as both:
            (last,) = await both.through(Last(None, 8, 2, 99))
            assert isinstance(last, Last)
            assert last.digest ^ 99 == 1 << draw % 64

    run(main())


def test_a_cut_is_heard_at_both_ends() -> None:
    async def main() -> None:
        async with pair(before(Point.LAST, Action.CUT)) as both:
            await both.near.send(CHUNK)
            with pytest.raises(LinkClosed):
                await both.near.send(Last(None, 8, 2, 99))
            for end in (both.near, both.far):
                with pytest.raises(LinkClosed):
                    await end.receive()

    run(main())


def test_processes_and_clients_are_told() -> None:
    async def main() -> None:
        async with pair(before(Point.FIRST_FRAME, Action.KILL, seconds=2.0)) as both:
            with pytest.raises(LinkClosed):
                await both.near.send(CHUNK)
            assert both.process.calls == [("kill", 2.0)]
        async with pair(before(Point.FIRST_FRAME, Action.FREEZE, seconds=2.0)) as both:
            assert await both.through(CHUNK) == [CHUNK]
            assert both.process.calls == [("freeze", 2.0)]
        async with pair(before(Point.FIRST_FRAME, Action.LEAVE)) as both:
            assert await both.through(CHUNK) == [CHUNK]
            assert both.process.calls == [("leave", "")]

    run(main())


def test_faults_when_a_message_arrives() -> None:
    """The exporter is frozen by an Ack, and still gets it."""

    async def main() -> None:
        async with pair(Fault(Place(Point.ACK, Moment.AFTER), 2, Action.FREEZE, 1.5)) as both:
            for _ in range(2):
                await both.far.send(Ack())
            for calls in ([], [("freeze", 1.5)]):
                assert await both.near.receive() == Ack()
                assert both.process.calls == calls

    run(main())


def test_a_receive_that_is_cancelled_takes_nothing() -> None:
    async def main() -> None:
        async with pair(before(Point.LAST, Action.DROP)) as both:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await both.near.receive()
            await both.far.send(Alive())
            assert await both.near.receive() == Alive()

    run(main())


def _bits(chunk: Chunk) -> int:
    """Payload and checksums as one number, the payload lowest."""
    assert isinstance(chunk.payload, bytes)
    data = chunk.payload + b"".join(value.to_bytes(8, "little") for value in chunk.checksums)
    return int.from_bytes(data, "little")

"""A link on which a plan's faults happen. It goes round any link, memory or grpc, of one process.

Each process that shall see faults gets one; what a fault does to a process or a client is a callback, because only the
caller knows how (in a real process, kill is os.kill with SIGKILL). It must never lose or change a message but by the
plan.
"""

import asyncio
from dataclasses import replace
from typing import Generic, Protocol, TypeVar, cast

from contracts.handover import Chunk, ExporterMessage, Last, PullerMessage
from contracts.session import RouterMessage, WorkerMessage
from protos.links.base import Duplex, Handler, Link, LinkClosed
from protos.stream_handler import Breakable
from simulator.fault_plan import Fault, FaultPlan
from simulator.fault_points import Action, Moment
from simulator.recogniser import Message, Recogniser

SendT = TypeVar("SendT", bound=Message)
ReceiveT = TypeVar("ReceiveT", bound=Message)


class Process(Protocol):
    """What faults do to the process whose link this is, and to the clients of its requests. All return at once."""

    def kill(self, seconds: float) -> None:
        """Like kill -9; a new incarnation starts so many seconds later."""

    def freeze(self, seconds: float) -> None:
        """Like SIGSTOP, and SIGCONT so many seconds later."""

    def leave(self, request_id: str) -> None:
        """The client of this request goes away."""


class FaultyLink:
    """See the module. Implements Link."""

    def __init__(self, inner: Link, plan: FaultPlan, process: Process) -> None:
        self._inner = inner
        self._plan = plan
        self._process = process

    async def serve(self, address: str, handler: Handler) -> str:
        return await self._inner.serve(address, _FaultyHandler(handler, self._plan, self._process))

    async def open_session(self, address: str) -> Duplex[RouterMessage, WorkerMessage]:
        return FaultyStream(await self._inner.open_session(address), self._plan, self._process)

    async def open_pull(self, address: str) -> Duplex[PullerMessage, ExporterMessage]:
        return FaultyStream(await self._inner.open_pull(address), self._plan, self._process)

    async def scrape(self, address: str, timeout: float) -> str:
        return await self._inner.scrape(address, timeout)

    async def close(self) -> None:
        await self._inner.close()


class _FaultyHandler:
    """The streams that others open. Implements Handler."""

    def __init__(self, inner: Handler, plan: FaultPlan, process: Process) -> None:
        self._inner = inner
        self._plan = plan
        self._process = process

    async def session(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        await self._inner.session(FaultyStream(stream, self._plan, self._process))

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        await self._inner.pull(FaultyStream(stream, self._plan, self._process))

    async def scrape(self) -> str:
        return await self._inner.scrape()


class FaultyStream(Generic[SendT, ReceiveT]):
    """One end of a stream. See Duplex."""

    def __init__(self, inner: Duplex[SendT, ReceiveT], plan: FaultPlan, process: Process) -> None:
        self._inner = inner
        self._plan = plan
        self._process = process
        self._recogniser = Recogniser()
        self._turn = asyncio.Lock()  # a message that is late holds up those behind it
        self._passed_over: SendT | None = None  # waits until the next one has gone

    async def send(self, message: SendT) -> None:
        async with self._turn:
            for each in await self._struck(message):
                await self._inner.send(each)

    async def receive(self) -> ReceiveT | None:
        message = await self._inner.receive()
        if message is not None:
            # no await from here on: a receive that is cancelled must take nothing
            sight = self._recogniser.see(message)
            fault = self._plan.strike(sight.point, Moment.AFTER)
            if fault is not None:
                self._happen(fault, sight.request_id)
        return message

    async def close(self) -> None:
        await self._inner.close()

    async def _struck(self, message: SendT) -> list[SendT]:
        """What goes out instead of the message, perhaps later."""
        sight = self._recogniser.see(message)
        fault = self._plan.strike(sight.point, Moment.BEFORE)
        passed_over, self._passed_over = self._passed_over, None
        out = [message]
        if fault is not None:
            match fault.action:
                case Action.DROP:
                    out = []
                case Action.DELAY:
                    await asyncio.sleep(fault.seconds)
                case Action.DUPLICATE:
                    out = [message, message]
                case Action.REORDER:
                    out, self._passed_over = [], message
                case Action.CORRUPT:
                    out = [_damaged(message, fault.draw)]
                case _:
                    self._happen(fault, sight.request_id)
        return out if passed_over is None else [*out, passed_over]

    def _happen(self, fault: Fault, request_id: str) -> None:
        """Raises LinkClosed when the stream is gone."""
        match fault.action:
            case Action.CUT:
                # every link's streams can be broken; Duplex does not show it because only their link does it
                cast(Breakable, self._inner).break_off("the stream was cut")
                raise LinkClosed("the stream was cut")
            case Action.KILL:
                self._process.kill(fault.seconds)
                raise LinkClosed("this process was killed")
            case Action.FREEZE:
                self._process.freeze(fault.seconds)
            case Action.LEAVE:
                self._process.leave(request_id)
            case _:
                raise ValueError(f"not at this place: {fault}")


def _damaged(message: SendT, draw: int) -> SendT:
    """One bit of a Chunk's payload or checksums, or of Last's digest, is flipped. Raises ValueError for others."""
    match message:
        case Chunk():
            payload = bytearray(message.payload)
            bits = 8 * len(payload)
            bit = draw % (bits + 64 * len(message.checksums))
            if bit < bits:
                payload[bit // 8] ^= 1 << bit % 8
                return replace(message, payload=bytes(payload))
            sums = list(message.checksums)
            sums[(bit - bits) // 64] ^= 1 << (bit - bits) % 64
            return replace(message, checksums=tuple(sums))
        case Last():
            return replace(message, digest=message.digest ^ 1 << draw % 64)
    raise ValueError(f"a {type(message).__name__} has no checksum")

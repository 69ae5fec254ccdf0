"""A process made of functions behind a link, and the small messages that tests of links send."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from contracts.handover import ExporterMessage, PullerMessage
from contracts.requests import AttemptKey
from contracts.session import Cancel, RouterMessage, WorkerFrame, WorkerMessage
from contracts.workers import WorkerLoad
from protos.links.base import Duplex, Link

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


async def serve(link: Link, process: Process) -> str:
    return await link.serve("127.0.0.1:0", process)

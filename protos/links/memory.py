"""Link inside one event loop, over a MemoryNetwork: for tests, the simulator and cluster/local.py.

It behaves as the grpc link does, without bytes: bounded queues, orderly ends, breaks. It never copies or
encodes a message.
"""

import asyncio
import logging
from typing import Generic, TypeVar

from contracts.handover import ExporterMessage, PullerMessage
from contracts.session import RouterMessage, WorkerMessage
from protos.links.base import Duplex, Handler, Link, LinkClosed
from protos.memory_network import Endpoint, MemoryNetwork, Pipe
from protos.stream_handler import run_handler

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")

_log = logging.getLogger(__name__)


def create(network: MemoryNetwork) -> Link:
    """A link of one process on `network`."""
    return _MemoryLink(network)


class _MemoryLink:
    """See Link."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._endpoint = Endpoint()

    async def serve(self, address: str, handler: Handler) -> str:
        return self._network.bind(self._endpoint, address, handler)

    async def open_session(self, address: str) -> Duplex[RouterMessage, WorkerMessage]:
        there, handler = self._network.find(address)
        mine: _Stream[RouterMessage, WorkerMessage]
        theirs: _Stream[WorkerMessage, RouterMessage]
        mine, theirs = _connect(self._endpoint, there)
        there.answer(run_handler(handler.session, theirs))
        return mine

    async def open_pull(self, address: str) -> Duplex[PullerMessage, ExporterMessage]:
        there, handler = self._network.find(address)
        mine: _Stream[PullerMessage, ExporterMessage]
        theirs: _Stream[ExporterMessage, PullerMessage]
        mine, theirs = _connect(self._endpoint, there)
        there.answer(run_handler(handler.pull, theirs))
        return mine

    async def scrape(self, address: str, timeout: float) -> str:
        there, _ = self._network.find(address)
        try:
            async with asyncio.timeout(timeout):
                await there.thawed()
                _, handler = self._network.find(address)
                return await handler.scrape()
        except TimeoutError as error:
            raise LinkClosed(f"{address} did not answer in {timeout:g} s") from error
        except LinkClosed:
            raise
        except Exception as error:
            _log.exception("scrape failed")
            raise LinkClosed(f"the scrape of {address} failed: {error!r}") from error

    async def close(self) -> None:
        self._endpoint.stop("the other process has closed its link")
        tasks = tuple(self._endpoint.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Stream(Generic[SendT, ReceiveT]):
    """One end of a stream. See Duplex."""

    def __init__(self, outgoing: Pipe[SendT], incoming: Pipe[ReceiveT]) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    async def send(self, message: SendT) -> None:
        await self._outgoing.put(message)

    async def receive(self) -> ReceiveT | None:
        return await self._incoming.get()

    async def close(self) -> None:
        self._outgoing.end()
        self._incoming.break_off("the stream is closed")

    def break_off(self, reason: str) -> None:
        self._outgoing.break_off(reason)
        self._incoming.break_off(reason)


def _connect(here: Endpoint, there: Endpoint) -> tuple[_Stream[SendT, ReceiveT], _Stream[ReceiveT, SendT]]:
    """The two ends of a new stream."""
    forth: Pipe[SendT] = Pipe((here, there))
    back: Pipe[ReceiveT] = Pipe((there, here))
    return _Stream(forth, back), _Stream(back, forth)

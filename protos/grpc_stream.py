"""One stream over grpc.aio as a Duplex, for both ends; protos/links/grpc.py makes them.

It hides what grpc.aio does otherwise: cancelling a read or write kills the whole call (here the operation
goes on and the next one takes its place), errors have many types (here all are LinkClosed), and a server
cannot tell a client's half-close from its death (here a client says goodbye). It knows no protocol.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio

from contracts.errors import InvalidRequest
from protos.links.base import LinkClosed

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")
ResultT = TypeVar("ResultT")

CLOSE_SECONDS = 1.0
"""How long a client that closes a stream waits for the other end to end it too."""

_BROKEN = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError, LinkClosed)

_log = logging.getLogger(__name__)


class GrpcCall(Protocol):
    """The raw end of a call. Its operations raise _BROKEN errors; cancelling one may end the call."""

    async def read(self) -> bytes | None:
        """None: the other end ended the call in order."""

    async def write(self, data: bytes) -> None: ...

    async def finish(self, reading: asyncio.Task[Any] | None, writing: asyncio.Task[Any] | None) -> None:
        """End the call in order. The tasks are operations that may not have returned."""

    def abort(self, reason: str) -> None:
        """End the call at once. Does nothing to one that has ended."""


class ClientCall:
    """A GrpcCall of the opening side. `goodbye` is the message that ends its half in order."""

    def __init__(self, call: Any, goodbye: bytes) -> None:
        self._call = call
        self._goodbye = goodbye

    async def read(self) -> bytes | None:
        data: bytes | Any = await self._call.read()
        return data if isinstance(data, bytes) else None

    async def write(self, data: bytes) -> None:
        await self._call.write(data)

    async def finish(self, reading: asyncio.Task[Any] | None, writing: asyncio.Task[Any] | None) -> None:
        if self._call.done():
            return
        if writing is not None:
            await asyncio.wait({writing})
        await self._call.write(self._goodbye)
        await self._call.done_writing()
        if reading is not None:  # the other end's answer to the goodbye ends it
            await asyncio.wait({reading})
        while await self.read() is not None:  # what is on its way must be read before the call can end
            pass

    def abort(self, reason: str) -> None:
        self._call.cancel()


class ServerCall:
    """A GrpcCall of the serving side. It lasts until `over`, whose value is "" or why it broke."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read(self) -> bytes | None:
        data: bytes | Any = await self._context.read()
        if not isinstance(data, bytes):
            raise LinkClosed("the other end is gone")
        return data

    async def write(self, data: bytes) -> None:
        await self._context.write(data)

    async def finish(self, reading: asyncio.Task[Any] | None, writing: asyncio.Task[Any] | None) -> None:
        self.abort("")

    def abort(self, reason: str) -> None:
        if not self.over.done():
            self.over.set_result(reason)


class GrpcStream(Generic[SendT, ReceiveT]):
    """A Duplex on a GrpcCall. `decode` returns None for a goodbye."""

    def __init__(
        self, call: GrpcCall, encode: Callable[[SendT], bytes], decode: Callable[[bytes], ReceiveT | None]
    ) -> None:
        self._call = call
        self._encode = encode
        self._decode = decode
        self._reading: asyncio.Task[bytes | None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._ended = False  # by the other end, in order
        self._over = ""  # why nothing can be sent or received any more

    async def send(self, message: SendT) -> None:
        data = self._encode(message)
        if self._writing is not None:  # left by a send that was cancelled
            await self._result(self._writing)
        self._check()
        self._writing = asyncio.create_task(self._call.write(data))
        await self._result(self._writing)
        self._writing = None

    async def receive(self) -> ReceiveT | None:
        self._check()
        if self._ended:
            return None
        if self._reading is None:
            self._reading = asyncio.create_task(self._call.read())
        data = await self._result(self._reading)
        # the next message comes in while this one is worked on
        self._reading = None if data is None else asyncio.create_task(self._call.read())
        try:
            message = None if data is None else self._decode(data)
        except InvalidRequest as error:
            self.break_off(error.message)
            raise LinkClosed(error.message) from error
        self._ended = message is None
        return message

    async def close(self) -> None:
        if self._over:
            return
        self._over = "the stream is closed"
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._call.finish(self._reading, self._writing)
        except (TimeoutError, *_BROKEN) as error:
            _log.debug("a stream did not end in order: %r", error)
        finally:
            self._stop()

    def break_off(self, reason: str) -> None:
        """The stream ends here at once; both ends get LinkClosed with `reason`. Idempotent."""
        if not self._over:
            self._over = reason
            self._stop()

    def _stop(self) -> None:
        self._call.abort(self._over)
        for task in (self._reading, self._writing):
            if task is not None:  # a read ahead may have ended, with an error that nobody asked for
                task.cancel()
                task.add_done_callback(_forget)

    def _check(self) -> None:
        if self._over:
            raise LinkClosed(self._over)

    async def _result(self, task: asyncio.Task[ResultT]) -> ResultT:
        """Of an operation that goes on when its waiter is cancelled. Raises LinkClosed."""
        await asyncio.wait((task,))
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self.break_off("the call was cancelled")
        elif isinstance(error, _BROKEN):
            self.break_off(_reason(error))
        elif error is not None:
            raise error
        self._check()
        return task.result()


def _forget(task: asyncio.Task[Any]) -> None:
    """Nobody waits for it any more: its outcome is of no interest."""
    if not task.cancelled():
        task.exception()


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or repr(error)

"""Streams of raw bytes over gRPC, driven in several ways: what benchmarks/handover.py compares transport grpc with.

One process serves with `serve`, another opens a Way with `open_way`. No codec, no serialiser, no protocol: what is
left is gRPC itself. grpcio takes nothing but `bytes` as a message, so what sends parts of a pool must copy them into
one object first; Way.joined does that for each frame.
"""

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc
import grpc.aio

from protos.links.grpc import MESSAGE_BYTES

Measure = Callable[[], Awaitable[float]]
"""Moves all bytes once; the seconds that it took."""

_HOST = "127.0.0.1"
_SERVICE, _METHOD = "benchmark.Bytes", "Stream"
_REQUEST = struct.Struct("<II?")  # bytes of a frame, frames, whether each is joined from pieces
_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # each channel is a connection of its own
    ("grpc.enable_http_proxy", 0),
)
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Ports:
    """Of one process. `threads`: the synchronous server's."""

    loop: int
    threads: int


@dataclass(frozen=True, slots=True)
class Way:
    """How to move `total` bytes, or as near as whole frames of all streams come. `threads`: the synchronous API,
    with a thread for each stream on both ends, else grpc.aio. Stream n takes channel n modulo `channels`."""

    total: int
    frame: int
    channels: int = 1
    streams: int = 1
    threads: bool = False
    joined: bool = False

    @property
    def frames(self) -> int:
        """Of each stream."""
        return max(1, round(self.total / self.frame / self.streams))

    @property
    def request(self) -> bytes:
        """What one stream asks for."""
        return _REQUEST.pack(self.frame, self.frames, self.joined)

    def seconds_since(self, began: float) -> float:
        """For `total` bytes, from those of the whole frames."""
        return (time.perf_counter() - began) * self.total / (self.frames * self.frame * self.streams)


class _Frames:
    """Both servers send from one buffer."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._whole: dict[int, bytes] = {}

    def answer(self, request: bytes) -> Iterator[bytes]:
        """The frames that a request asks for."""
        size, frames, joined = _REQUEST.unpack(request)
        if size not in self._whole:
            self._whole[size] = bytes(self._data[:size])
        for _ in range(frames):
            yield b"".join((self._data[: size // 2], self._data[size // 2 : size])) if joined else self._whole[size]

    async def on_loop(self, _requests: object, context: Any) -> None:
        """grpc.aio's handler."""
        while isinstance(request := await context.read(), bytes):
            for frame in self.answer(request):
                await context.write(frame)

    def in_thread(self, requests: Iterator[bytes], _context: object) -> Iterator[bytes]:
        """grpc's handler."""
        for request in requests:
            yield from self.answer(request)


@asynccontextmanager
async def serve(data: memoryview) -> AsyncIterator[Ports]:
    """Both servers, until the body ends. No frame may be larger than `data`."""
    frames = _Frames(data)
    on_loop = grpc.aio.server(handlers=[_handler(frames.on_loop)], options=_OPTIONS)
    with ThreadPoolExecutor(_THREADS) as executor:
        in_threads = grpc.server(executor, handlers=[_handler(frames.in_thread)], options=_OPTIONS)
        ports = [server.add_insecure_port(f"{_HOST}:0") for server in (on_loop, in_threads)]
        await on_loop.start()
        in_threads.start()
        try:
            yield Ports(*ports)
        finally:
            await on_loop.stop(1.0)
            await asyncio.to_thread(in_threads.stop(1.0).wait)


def open_way(way: Way, ports: Ports) -> AbstractAsyncContextManager[Measure]:
    """Streams to the process that serves; they stay open while it measures."""
    return _in_threads(way, ports.threads) if way.threads else _on_loop(way, ports.loop)


@asynccontextmanager
async def _on_loop(way: Way, port: int) -> AsyncIterator[Measure]:
    channels: list[Any] = [grpc.aio.insecure_channel(f"{_HOST}:{port}", _OPTIONS) for _ in range(way.channels)]
    calls = [channels[n % way.channels].stream_stream(f"/{_SERVICE}/{_METHOD}")() for n in range(way.streams)]

    async def read(call: Any) -> None:
        await call.write(way.request)
        for _ in range(way.frames):
            await call.read()

    async def measure() -> float:
        began = time.perf_counter()
        await asyncio.gather(*map(read, calls))
        return way.seconds_since(began)

    try:
        yield measure
    finally:
        for call in calls:
            await call.done_writing()
            await call.code()  # the server has ended it too
        for channel in channels:
            await channel.close()


@asynccontextmanager
async def _in_threads(way: Way, port: int) -> AsyncIterator[Measure]:
    channels: list[Any] = [grpc.insecure_channel(f"{_HOST}:{port}", _OPTIONS) for _ in range(way.channels)]
    asking: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in range(way.streams)]
    calls = [
        channels[n % way.channels].stream_stream(f"/{_SERVICE}/{_METHOD}")(iter(queue.get, None))
        for n, queue in enumerate(asking)
    ]

    def read(number: int) -> None:
        asking[number].put(way.request)
        for _ in range(way.frames):
            next(calls[number])

    async def measure() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(asyncio.to_thread(read, number) for number in range(way.streams)))
        return way.seconds_since(began)

    try:
        yield measure
    finally:
        for queue, call in zip(asking, calls, strict=True):
            queue.put(None)  # ends the thread that takes from it
            await asyncio.to_thread(call.code)  # the server has ended it too
        for channel in channels:
            channel.close()


def _handler(answer: Callable[..., Any]) -> grpc.GenericRpcHandler:
    """Bytes in, bytes out."""
    return grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: grpc.stream_stream_rpc_method_handler(answer)})

"""Link between processes over grpc.aio: sessions, pulls and scrapes as pdserve.v1.Worker and KvTransfer.

Calls go through bytes and protos/codec instead of the generated stubs, so that a malformed message is an
error of ours and not one that grpc logs and drops. That a peer is alive is never concluded from an open
connection (leases come from messages); keepalive only ends connections to hosts that have vanished.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from contracts.config import MOST_FRAME_BYTES
from contracts.errors import InvalidRequest, StartupError
from contracts.handover import ExporterMessage, PullerMessage
from contracts.session import RouterMessage, WorkerMessage
from protos.codec import handover, session
from protos.grpc_stream import ClientCall, GrpcStream, ServerCall
from protos.links.base import Duplex, Handler, Link, LinkClosed
from protos.stream_handler import run_handler

MESSAGE_BYTES = 2 * MOST_FRAME_BYTES
"""Cap of one message, the same on both ends; the largest frame of KV is far below it, checksums and all."""
CONNECT_SECONDS = 2.0
"""How long an open waits for a connection."""

_KEEPALIVE = (("grpc.keepalive_time_ms", 5_000), ("grpc.keepalive_timeout_ms", 5_000))
_SIZES = (("grpc.max_send_message_length", MESSAGE_BYTES), ("grpc.max_receive_message_length", MESSAGE_BYTES))
_CLIENT_OPTIONS = (
    *_SIZES,
    *_KEEPALIVE,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once, whatever an old one waits for
)
_SERVER_OPTIONS = (
    *_SIZES,
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not shared
)
_WORKER = "pdserve.v1.Worker"
_KV_TRANSFER = "pdserve.v1.KvTransfer"
_ACCEPTED = ("pdserve-stream", "accepted")
"""Initial metadata with which the serving process answers a call at once."""


def create() -> Link:
    """The link of this process."""
    return _GrpcLink()


class _GrpcLink:
    """See Link."""

    def __init__(self) -> None:
        self._server: grpc.aio.Server | None = None
        self._channels = _Channels()
        self._answering: dict[asyncio.Task[None], GrpcStream[Any, Any]] = {}

    async def serve(self, address: str, handler: Handler) -> str:
        host = await _check_bindable(address)

        async def serve_session(_requests: object, context: object) -> None:
            call = ServerCall(context)
            stream = GrpcStream(call, session.encode_worker, session.decode_router)
            await self._answer(context, call, stream, handler.session)

        async def serve_pull(_requests: object, context: object) -> None:
            call = ServerCall(context)
            stream = GrpcStream(call, handover.encode_exporter, handover.decode_puller)
            await self._answer(context, call, stream, handler.pull)

        async def serve_scrape(_request: object, _context: object) -> bytes:
            return session.encode_scrape(await handler.scrape())

        worker: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Session": grpc.stream_stream_rpc_method_handler(serve_session),
            "Scrape": grpc.unary_unary_rpc_method_handler(serve_scrape),
        }
        kv_transfer: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Pull": grpc.stream_stream_rpc_method_handler(serve_pull)
        }
        handlers = [
            grpc.method_handlers_generic_handler(_WORKER, worker),
            grpc.method_handlers_generic_handler(_KV_TRANSFER, kv_transfer),
        ]
        server = grpc.aio.server(handlers=handlers, options=_SERVER_OPTIONS)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {address}: {error}") from error
        await server.start()
        self._server = server
        return f"{host}:{port}"

    async def open_session(self, address: str) -> Duplex[RouterMessage, WorkerMessage]:
        call = ClientCall(await self._open(address, f"/{_WORKER}/Session"), session.encode_router(None))
        return GrpcStream(call, session.encode_router, session.decode_worker)

    async def open_pull(self, address: str) -> Duplex[PullerMessage, ExporterMessage]:
        call = ClientCall(await self._open(address, f"/{_KV_TRANSFER}/Pull"), handover.encode_puller(None))
        return GrpcStream(call, handover.encode_puller, handover.decode_exporter)

    async def scrape(self, address: str, timeout: float) -> str:
        try:
            async with asyncio.timeout(timeout):
                channel = await self._channels.connect(address)
                ask: Any = channel.unary_unary(f"/{_WORKER}/Scrape")
                return session.decode_scrape(await ask(b""))  # an empty ScrapeRequest
        except TimeoutError as error:
            raise LinkClosed(f"{address} did not answer in {timeout:g} s") from error
        except (grpc.aio.AioRpcError, InvalidRequest) as error:
            raise LinkClosed(f"the scrape of {address} failed: {error}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise LinkClosed("this link is closed") from error  # which grpc shows as a cancellation

    async def close(self) -> None:
        for task, stream in self._answering.items():
            stream.break_off("the other process has closed its link")
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0)
        await self._channels.close()

    async def _open(self, address: str, method: str) -> Any:
        """A call that the other process has answered: a connection alone may be to a dead or frozen one."""
        channel = await self._channels.connect(address)
        call: Any = channel.stream_stream(method)()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                accepted = _ACCEPTED in tuple(await call.initial_metadata())
        except TimeoutError as error:
            call.cancel()
            raise LinkClosed(f"{address} accepted no stream within {CONNECT_SECONDS:g} s") from error
        except asyncio.CancelledError:
            call.cancel()
            raise
        if not accepted:  # grpc makes up empty metadata for a call that failed
            call.cancel()
            raise LinkClosed(f"nobody answers at {address}")
        return call

    async def _answer(
        self,
        context: Any,
        call: ServerCall,
        stream: GrpcStream[Any, Any],
        handler: Callable[[GrpcStream[Any, Any]], Awaitable[None]],
    ) -> None:
        """Answers one call. grpc cancels this coroutine when the call breaks; the handler is a task of its
        own, so that it learns of that from its stream and not by being cancelled."""
        await context.send_initial_metadata((_ACCEPTED,))
        task = asyncio.create_task(run_handler(handler, stream))
        self._answering[task] = stream
        task.add_done_callback(self._answering.pop)
        try:
            failure = await call.over
        except asyncio.CancelledError:
            stream.break_off("the other end is gone")
            raise
        if failure:
            await context.abort(grpc.StatusCode.UNAVAILABLE, failure)


class _Channels:
    """One connected channel for each address. A channel that has lost its connection is replaced, so that a
    restarted server is reached at once instead of after the old channel's backoff."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._closed = False

    async def connect(self, address: str) -> grpc.aio.Channel:
        """Raises LinkClosed when nobody answers within CONNECT_SECONDS, and after close."""
        async with self._locks.setdefault(address, asyncio.Lock()):
            if self._closed:
                raise LinkClosed("this link is closed")
            channel = self._channels.get(address)
            if channel is not None and channel.get_state() is grpc.ChannelConnectivity.READY:
                return channel
            if channel is not None:
                await channel.close(None)
            self._channels[address] = channel = grpc.aio.insecure_channel(address, _CLIENT_OPTIONS)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await _ready(channel)
            except (TimeoutError, LinkClosed, grpc.aio.BaseError) as error:
                del self._channels[address]
                await channel.close(None)
                raise LinkClosed(f"nobody answers at {address}") from error
            return channel

    async def close(self) -> None:
        """Breaks every call. Idempotent."""
        self._closed = True
        for channel in tuple(self._channels.values()):
            await channel.close(None)


async def _check_bindable(address: str) -> str:
    """The host in `address`. Raises StartupError with the system's reason when it cannot be bound; grpc
    itself keeps the reason to itself and takes port numbers modulo 65536."""
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise StartupError(f"cannot listen on {address!r}: it is not of the form host:port")
    try:
        name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        raise StartupError(f"cannot listen on {address}: {error.strerror}") from error
    except UnicodeError as error:
        raise StartupError(f"cannot listen on {address}: not a host name") from error
    return host


async def _ready(channel: grpc.aio.Channel) -> None:
    """Waits for the connection. Raises LinkClosed when it fails."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise LinkClosed(f"connection state {state.name}")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)

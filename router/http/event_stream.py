"""A streamed answer as server-sent events: when the header goes out, pings, errors, slow clients.

Returned by openai_routes.py. The header goes out with the first bytes, so that an error before them is a
plain HTTP error. Never ends a broken answer as if it were whole.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from contracts.config import LimitsConfig
from contracts.errors import PdserveError
from router.http.connection import ClientGone, while_connected
from router.http.errors import error_body

DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"

logger = logging.getLogger(__name__)


def event(data: bytes) -> bytes:
    """One event. `data` is JSON without line ends."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """An ASGI response. `events` yields whole events (or nothing: only the header goes out) and is closed as
    soon as the client goes away or stops reading."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], limits: LimitsConfig, request_id: str) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._limits = limits
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send, self.raw_headers, self._limits.slow_client_seconds)
        try:
            await while_connected(receive, self._stream(writer))
        except ClientGone as error:
            logger.info("request %s: %s", self._request_id, error.message)

    async def _stream(self, writer: "_Writer") -> None:
        try:
            async with asyncio.TaskGroup() as group:
                pinger = group.create_task(self._ping(writer))
                async with aclosing(self._events) as events:
                    async for data in events:
                        await writer.write(data)
                pinger.cancel()
            last = DONE
        except ExceptionGroup as failed:
            last = self._failure(failed.exceptions[-1], writer.started)
        await writer.write(last, more=False)

    def _failure(self, error: Exception, started: bool) -> bytes:
        """The last events of a broken answer. Raises the error again where it can still be a plain answer,
        and where nobody listens."""
        if not started or isinstance(error, ClientGone):
            raise error
        if not isinstance(error, PdserveError):
            logger.error("request %s failed", self._request_id, exc_info=error)
            error = PdserveError("internal error")
        return event(error_body(error)) + DONE

    async def _ping(self, writer: "_Writer") -> None:
        """Shows proxies and clients that a silent stream is alive."""
        loop = asyncio.get_running_loop()
        silent = self._limits.silent_header_seconds
        while True:
            await asyncio.sleep(writer.last + silent - loop.time())
            if loop.time() >= writer.last + silent:
                await writer.write(_PING)


class _Writer:
    """The send side of one response, shared by the answer and its pings."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], patience: float) -> None:
        self._send = send
        self._headers = headers
        self._patience = patience
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self.started = False
        self.last = self._loop.time()

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Raises ClientGone (slow_client) when the client has not read for `patience` seconds."""
        async with self._lock:
            try:
                async with asyncio.timeout(self._patience):
                    if not self.started:
                        self.started = True
                        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                    if data or not more:
                        await self._send({"type": "http.response.body", "body": data, "more_body": more})
            except TimeoutError as error:
                raise ClientGone(f"slow_client: nothing was read for {self._patience:g} s") from error
            self.last = self._loop.time()

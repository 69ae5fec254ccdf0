"""uvicorn inside a loop that belongs to somebody else.

Started and stopped by router/frontends.py. Installs no signal handlers and configures no logging.
"""

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from router.http.http_protocol import HttpProtocol
from router.listening import listen

_SEND_BUFFER = 64 * 1024
"""Bytes. Small, so that a client which does not read is noticed soon and holds little memory."""


class HttpServer:
    """One listening socket and the connections that came over it."""

    def __init__(self, app: ASGIApp, host: str, port: int, slow_client_seconds: float) -> None:
        self._host = host
        self._port = port
        self._slow_client_seconds = slow_client_seconds
        self._config = uvicorn.Config(
            app,
            http=HttpProtocol,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
        )
        self._server = uvicorn.Server(self._config)
        self._socket: socket.socket | None = None

    async def start(self) -> int:
        """Listen; the bound port. Raises StartupError when the address cannot be bound."""
        self._socket = self._bind()
        # Server.serve would take over the signals and wake up ten times a second; these are its two halves.
        self._config.load()
        self._server.lifespan = self._config.lifespan_class(self._config)
        await self._server.startup(sockets=[self._socket])
        return int(self._socket.getsockname()[1])

    async def stop(self, grace: float) -> None:
        """Take no more connections, let requests end for `grace` seconds, then cancel them. Idempotent."""
        if self._socket is None:
            return
        listening, self._socket = self._socket, None
        self._config.timeout_graceful_shutdown = max(1, round(grace))
        await self._server.shutdown(sockets=[listening])
        await asyncio.gather(*self._server.server_state.tasks)

    def _bind(self) -> socket.socket:
        listening = listen(self._host, self._port, "HTTP")
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        # Connections inherit it. Otherwise a token could wait 40 ms for the acknowledgement of the one before.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: after we gave up, the kernel drops what is still unread
            milliseconds = int(2 * self._slow_client_seconds * 1000)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        return listening

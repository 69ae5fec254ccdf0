"""Lets pullers in that know an exporter's key: each connection becomes one channel.

A transport that listens owns one. A stranger must never cost more than a socket for a moment.
"""

import asyncio
import logging
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable

from kv_transfer.channels.sockets import KEY_BYTES, accept, tell_failure
from kv_transfer.channels.tcp_greeting import TcpAddress, listen, welcome
from protos.links.base import LinkClosed

_MOST_STRANGERS = 64
"""Connections that may be in their greeting at one time; more wait in the listener's queue."""

_log = logging.getLogger(__name__)


class Admission:
    """`enter` takes the socket of each puller with the name that it has given to the channel; what it does before it
    waits for the first time, the puller finds done. It may raise LinkClosed. `give_up`: see tcp_greeting."""

    def __init__(
        self,
        give_up: float,
        enter: Callable[[bytes, socket.socket], Awaitable[None]],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._give_up = give_up
        self._enter = enter
        self._key = secrets.token_bytes(KEY_BYTES)
        self._listener: socket.socket | None = None
        self._admitting: asyncio.Task[None] | None = None

    async def open(self, host: str) -> TcpAddress:
        """Raises StartupError."""
        self._listener = await listen(host)
        self._admitting = asyncio.create_task(self._admit(self._listener))
        self._admitting.add_done_callback(tell_failure)
        bound, port = self._listener.getsockname()[:2]
        return TcpAddress(bound, port, self._key)

    async def close(self) -> None:
        """Whoever is not in yet is turned away. Idempotent."""
        if self._listener is None or self._admitting is None:
            return
        self._admitting.cancel()
        await asyncio.wait({self._admitting})
        self._listener.close()

    async def _admit(self, listener: socket.socket) -> None:
        strangers = asyncio.Semaphore(_MOST_STRANGERS)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await strangers.acquire()
                welcoming = tasks.create_task(self._welcome(await accept(listener)))
                welcoming.add_done_callback(lambda _: strangers.release())

    async def _welcome(self, sock: socket.socket) -> None:
        try:
            sock, name = await welcome(sock, self._key, self._tls, self._give_up)
            await self._enter(name, sock)
        except LinkClosed as closed:
            _log.info("a connection for KV blocks was dropped: %s", closed)

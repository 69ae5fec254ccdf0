"""What all sockets that wait on the event loop have in common. The sockets that listen and those that greet use it."""

import asyncio
import logging
import socket

GREETING_SECONDS = 2.0
"""What connecting and greeting may take in all."""
BACKLOG = 1024
"""Connections that wait to be accepted. What comes when it is full the system drops, and the other end tries again a
second later: a burst of hand-overs must fit."""
KEY_BYTES = 16
"""Of the key in an exporter's address."""

_OUT_OF_DESCRIPTORS_SECONDS = 1.0

_log = logging.getLogger(__name__)


async def readable(file: socket.socket | int) -> None:
    """Returns when something has come, or the other end has closed. A socket, or a descriptor."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(file, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(file)


def tell_failure(accepting: asyncio.Task[None]) -> None:
    """For the end of a task that accepts: an error of ours must show at once, as from then on nobody gets in."""
    if not accepting.cancelled() and (error := accepting.exception()):
        _log.error("no more connections for KV blocks are taken", exc_info=error)


async def accept(listener: socket.socket) -> socket.socket:
    """The next that connects; it does not block."""
    while True:
        await readable(listener)
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            continue  # it has gone away again
        except OSError as error:
            _log.warning("cannot take a connection for KV blocks: %s", error)
            await asyncio.sleep(_OUT_OF_DESCRIPTORS_SECONDS)  # nothing tells when a file has been closed somewhere
            continue
        sock.setblocking(False)
        return sock

"""One connected socket that carries the blocks of one hand-over at a time.

transports/tcp.py makes them; group_channel.py has one beside its communicator, on which no blocks travel. Blocking
calls in threads move the bytes: one call takes a whole block, without the GIL, and wakes the event loop only at its
end. A job must end as soon as the channel is broken, and its socket must never be closed before.
"""

import asyncio
import itertools
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from kv_transfer.channels.threads import Threads
from protos.links.base import LinkClosed

T = TypeVar("T")


class TcpChannel:
    """One end of a channel, see channels.Channel. The connected socket belongs to it; `on_break` is called once."""

    def __init__(
        self, name: bytes, sock: socket.socket, threads: Threads, on_break: Callable[["TcpChannel"], None]
    ) -> None:
        self.name = name
        self._sock = sock
        self._threads = threads
        self._on_break = on_break
        self._broken = False
        self._turn = asyncio.Lock()
        self._numbers = itertools.count()
        sock.setblocking(True)

    @property
    def usable(self) -> bool:
        """False when it is broken, has ended, or holds bytes that nobody has asked for."""
        if self._broken:
            return False
        try:
            # the base class: also with TLS, what counts is the bytes on the wire
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def watch(self) -> None:
        """Break when anything comes from the other end. It never sends, so it can only be its end."""
        asyncio.get_running_loop().add_reader(self._sock, self.break_off)
        self._sock.setblocking(True)  # libuv turns that off for what it watches

    def next_number(self) -> int:
        """Of a frame that will be sent on it: 0, 1, ..."""
        return next(self._numbers)

    async def run(self, job: Callable[[socket.socket], T]) -> T:
        """A job that sends or receives, in a thread, one after the other. Raises LinkClosed when the channel breaks,
        or what the job raises. Unless it returns, cancelled or failed, the channel is broken; in any case the job
        has ended."""
        try:
            return await self._run_in_turn(job)
        except OSError as error:
            self.break_off()
            raise LinkClosed(f"the channel broke: {error}") from error
        except BaseException:
            self.break_off()
            raise
        finally:
            self._close_when_unused()

    async def _run_in_turn(self, job: Callable[[socket.socket], T]) -> T:
        async with self._turn:
            if self._broken:
                raise LinkClosed("the channel is broken")
            return await self._threads.run(lambda: job(self._sock), self.break_off)

    def break_off(self) -> None:
        """Whatever uses it ends at once, on both sides. Idempotent."""
        if self._broken:
            return
        self._broken = True
        asyncio.get_running_loop().remove_reader(self._sock)
        with suppress(OSError):  # the other end may have been faster
            # wakes a thread that waits in it; the base class, as a TLS socket would first drop its encryption, and
            # the thread go on in the clear
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._close_when_unused()
        self._on_break(self)

    def _close_when_unused(self) -> None:
        """Not while a thread is in it: its descriptor may soon be another file's."""
        if self._broken and not self._turn.locked():
            self._sock.close()


def send(sock: socket.socket, pieces: Iterable[bytes | memoryview]) -> None:
    """All of them, in order. One call for each, as gathering large ones is slower."""
    for piece in pieces:
        sock.sendall(piece)


def receive_into(sock: socket.socket, space: memoryview) -> None:
    """Fill the space. Raises ConnectionError when the other end has closed before."""
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    while space:
        count = sock.recv_into(space, len(space), flags)
        if not count:
            raise ConnectionError("the other end closed it")
        space = space[count:]

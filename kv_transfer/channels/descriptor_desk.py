"""How the descriptor of a pool gets to another process of the same host: over a Unix socket, for those with the key.

transports/shared_memory.py calls it. The socket's name is random and abstract, so there is no file; it exists in one
network namespace. A stranger must never cost more than a socket for a moment, nor learn anything.
"""

import asyncio
import hmac
import logging
import os
import secrets
import socket
import struct
from dataclasses import dataclass, field

from contracts.errors import StartupError
from kv_transfer.channels.sockets import BACKLOG, GREETING_SECONDS, KEY_BYTES, accept, readable, tell_failure
from protos.links.base import LinkClosed

_SHAPE = struct.Struct("<QQ")
_DESCRIPTOR = struct.Struct("i")
_MOST_STRANGERS = 64
"""Connections that have not shown the key yet; more wait in the listener's queue."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeskAddress:
    """Where an exporter listens, and the key without which it speaks to nobody."""

    name: str
    key: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.name}/{self.key.hex()}"

    @property
    def path(self) -> bytes:
        """For bind and connect."""
        return b"\0" + self.name.encode()

    @staticmethod
    def parse(text: str) -> "DeskAddress":
        """Raises LinkClosed for what no exporter has given."""
        name, _, key = text.partition("/")
        try:
            address = DeskAddress(name, bytes.fromhex(key))
        except ValueError as error:
            raise LinkClosed(f"{name!r} with its key is no shared_memory address of an exporter") from error
        if len(address.key) != KEY_BYTES:
            raise LinkClosed(f"{name!r} with its key is no shared_memory address of an exporter")
        return address


@dataclass(frozen=True, slots=True)
class Shape:
    """What the file holds."""

    blocks: int
    block_bytes: int


class DescriptorDesk:
    """Exporter: gives the descriptor to everybody who shows the key, and stays connected to them."""

    def __init__(self, descriptor: int, shape: Shape) -> None:
        """Raises StartupError."""
        self._descriptor = descriptor
        self._shape = _SHAPE.pack(shape.blocks, shape.block_bytes)
        self._address = DeskAddress(f"pdserve-{secrets.token_hex(16)}", secrets.token_bytes(KEY_BYTES))
        self._strangers = asyncio.Semaphore(_MOST_STRANGERS)
        try:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.setblocking(False)
            self._listener.bind(self._address.path)
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise StartupError(f"cannot listen on a Unix socket for the pool's memory: {error}") from error
        self._admitting = asyncio.create_task(self._admit())
        self._admitting.add_done_callback(tell_failure)

    @property
    def address(self) -> str:
        """To give to those who may read the pool."""
        return str(self._address)

    async def close(self) -> None:
        """Disconnect everybody. Idempotent."""
        self._admitting.cancel()
        await asyncio.wait({self._admitting})
        self._listener.close()

    async def _admit(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._strangers.acquire()
                tasks.create_task(self._serve(await accept(self._listener)))

    async def _serve(self, sock: socket.socket) -> None:
        try:
            try:
                async with asyncio.timeout(GREETING_SECONDS):
                    await self._greet(sock)
            finally:
                self._strangers.release()
            await asyncio.get_running_loop().sock_recv(sock, 1)  # it never sends: this is its end
        except OSError as error:
            _log.info("a connection for the pool's memory was dropped: %r", error)
        finally:
            sock.close()

    async def _greet(self, sock: socket.socket) -> None:
        loop, key = asyncio.get_running_loop(), b""
        while len(key) < KEY_BYTES:
            more = await loop.sock_recv(sock, KEY_BYTES - len(key))
            if not more:
                raise ConnectionError("it showed no key")
            key += more
        if not hmac.compare_digest(key, self._address.key):
            raise ConnectionError("wrong key")
        socket.send_fds(sock, [self._shape], [self._descriptor])  # fits into the buffer of a new socket


async def fetch_descriptor(address: DeskAddress) -> tuple[socket.socket, int, Shape]:
    """Puller: the socket, which ends when the exporter does, and the exporter's descriptor with what it should hold;
    both belong to the caller. Raises LinkClosed."""
    try:
        sock = socket.socket(socket.AF_UNIX)
    except OSError as error:  # too many open files
        raise LinkClosed(f"no pool of memory at {address.name}: {error!r}") from error
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, address.path)
            sock.send(address.key)
            await readable(sock)
        return sock, *_take(sock)
    except OSError as error:
        sock.close()
        raise LinkClosed(f"no pool of memory at {address.name}: {error!r}") from error
    except BaseException:
        sock.close()
        raise


def _take(sock: socket.socket) -> tuple[int, Shape]:
    # socket.recv_fds of Python 3.11 drops its flags, and a child process would inherit the descriptor
    room = socket.CMSG_LEN(_DESCRIPTOR.size)
    shape, messages, _, _ = sock.recvmsg(_SHAPE.size, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = [_DESCRIPTOR.unpack(data)[0] for _, kind, data in messages if kind == socket.SCM_RIGHTS]
    if len(shape) != _SHAPE.size or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionError("it gave no descriptor")
    return descriptors[0], Shape(*_SHAPE.unpack(shape))

"""How the two ends of a TCP channel meet: connect, TLS where it is configured, key and name, acknowledgement.

admission.py calls it for exporters, transports/tcp.py and transports/nccl.py for pullers. Sockets do not block here,
and what the other end does not do in time is given up: a stranger costs a socket for a moment, never a thread. The
puller's greeting is the key of the exporter's address and the name of the channel, which the exporter sends back when
it knows the channel by it.
"""

import asyncio
import hmac
import math
import secrets
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import TypeVar

from contracts.errors import StartupError
from kv_transfer.channels.sockets import BACKLOG, GREETING_SECONDS, KEY_BYTES, readable
from protos.links.base import LinkClosed

NAME_BYTES = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Where an exporter listens (numeric host), and the key without which it speaks to nobody."""

    host: str
    port: int
    key: bytes = field(repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.key.hex()}"

    @staticmethod
    def parse(text: str) -> "TcpAddress":
        """Raises LinkClosed for what no exporter has given."""
        place, _, key = text.partition("/")
        host, _, port = place.rpartition(":")
        try:
            address = TcpAddress(str(ip_address(host.strip("[]"))), int(port), bytes.fromhex(key))
        except ValueError as error:
            raise LinkClosed(f"{place!r} with its key is no tcp address of an exporter") from error
        if not 0 < address.port < 65536 or len(address.key) != KEY_BYTES:
            raise LinkClosed(f"{place!r} with its key is no tcp address of an exporter")
        return address


async def listen(host: str) -> socket.socket:
    """A listener on a free port of the first address of `host` that this machine has. Raises StartupError."""
    failure: OSError | None = None
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        found, failure = [], error
    for family, kind, protocol, _, address in found:
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            failure = error
        else:
            listener.setblocking(False)
            return listener
    raise StartupError(f"cannot listen on {host} for KV blocks: {failure}") from failure


async def greet(address: TcpAddress, tls: ssl.SSLContext | None, give_up: float) -> tuple[socket.socket, bytes]:
    """Puller: a connected socket, and the name that the exporter knows its channel by. Raises LinkClosed."""
    name = secrets.token_bytes(NAME_BYTES)
    where = f"{address.host}:{address.port}"
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    except OSError as error:  # too many open files
        raise LinkClosed(f"no channel to {where}: {error!r}") from error
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            sock.setblocking(False)
            _set_options(sock, give_up)
            await asyncio.get_running_loop().sock_connect(sock, (address.host, address.port))
            sock = await _encrypt(sock, tls, server_side=False)
            sock.send(address.key + name)
            _same(await _receive(sock, NAME_BYTES), name, otherwise="what answers is no exporter")
    except OSError as error:
        sock.close()
        raise LinkClosed(f"no channel to {where}: {error!r}") from error
    except BaseException:
        sock.close()
        raise
    return sock, name


async def welcome(
    sock: socket.socket, key: bytes, tls: ssl.SSLContext | None, give_up: float
) -> tuple[socket.socket, bytes]:
    """Exporter: the socket and the channel's name, of a puller that knows the key. The caller enters the name before
    it waits for anything, as the puller goes on from here. Raises LinkClosed for all others, to whom nothing is
    said."""
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            _set_options(sock, give_up)
            sock = await _encrypt(sock, tls, server_side=True)
            greeting = await _receive(sock, KEY_BYTES + NAME_BYTES)
            _same(greeting[:KEY_BYTES], key, otherwise="wrong key")
            name = greeting[KEY_BYTES:]
            sock.send(name)
    except OSError as error:
        sock.close()
        raise LinkClosed(f"no puller has connected: {error!r}") from error
    except BaseException:
        sock.close()
        raise
    return sock, name


def _set_options(sock: socket.socket, give_up: float) -> None:
    """`give_up`: seconds after which the system ends the connection to a host that has vanished. The sizes of its
    buffers are left to the system, which adapts them: fixed ones were no faster, and hosts cap them low."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(give_up * 1000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # else an idle one would stay for ever
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, math.ceil(give_up))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, math.ceil(give_up))


async def _encrypt(sock: socket.socket, tls: ssl.SSLContext | None, *, server_side: bool) -> socket.socket:
    if tls is None:
        return sock
    encrypted = tls.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    try:
        await _when_readable(encrypted, encrypted.do_handshake)
    except BaseException:
        encrypted.close()
        raise
    return encrypted


def _same(came: bytes, expected: bytes, otherwise: str) -> None:
    if not hmac.compare_digest(came, expected):
        raise ConnectionError(otherwise)


async def _receive(sock: socket.socket, count: int) -> bytes:
    came = b""
    while len(came) < count:
        more = await _when_readable(sock, partial(sock.recv, count - len(came)))
        if not more:
            raise ConnectionError("it closed the connection")
        came += more
    return came


async def _when_readable(sock: socket.socket, attempt: Callable[[], T]) -> T:
    """The attempt's result, tried again whenever something has come. To send needs no such care: a greeting and a
    handshake fit into the buffer of a new socket."""
    while True:
        try:
            return attempt()
        except (BlockingIOError, ssl.SSLWantReadError):
            await readable(sock)

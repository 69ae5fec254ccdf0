"""Transport over TCP connections of its own: blocks go from pool to pool without a copy in between.

The payload of a Chunk is the number that the exporter's end of the channel gave it. On the channel it becomes one
frame: number and size (two little-endian uint64), then the bytes of the blocks in order. A frame whose number is not
the Chunk's, or that ends early, breaks the channel: bytes of one hand-over can never be taken for another's.
"""

import socket
import struct
from collections import deque
from collections.abc import Sequence
from functools import partial

from contracts.config import TransferConfig
from contracts.errors import Corrupt, HandoverFailed
from contracts.kv import BlockStore
from kv_transfer.channels.admission import Admission
from kv_transfer.channels.channels import Channels
from kv_transfer.channels.tcp_channel import TcpChannel, receive_into, send
from kv_transfer.channels.tcp_greeting import TcpAddress, greet
from kv_transfer.channels.threads import Threads
from kv_transfer.channels.tls import load_tls
from kv_transfer.frames import checksum
from kv_transfer.transports.base import Packed, Transport
from protos.links.base import LinkClosed

_NUMBER = struct.Struct("<Q")
_HEADER = struct.Struct("<QQ")
_MOST_THREADS = 256
"""Hand-overs that move bytes at one time; a frozen peer holds one thread until its lease ends."""


def create(store: BlockStore, config: TransferConfig) -> Transport:
    """Raises StartupError when a TLS file that the configuration names is missing or no good."""
    return _TcpTransport(store, config)


class _TcpTransport:
    """See Transport."""

    def __init__(self, store: BlockStore, config: TransferConfig) -> None:
        self._store = store
        self._give_up = config.lease_seconds  # when no hand-over can be alive any more
        self._tls = load_tls(config)
        self._threads = Threads("tcp", _MOST_THREADS)
        self._admission = Admission(self._give_up, self._enter, tls=self._tls.server if self._tls else None)
        self._opened: set[TcpChannel] = set()
        self._served: dict[bytes, TcpChannel] = {}

    async def serve(self, host: str) -> str:
        """The address holds a key, drawn at start."""
        return str(await self._admission.open(host))

    def outlet(self, channel: bytes) -> "_TcpOutlet":
        """Raises HandoverFailed also when the channel has broken."""
        if channel not in self._served:
            raise HandoverFailed("there is no such tcp channel here")
        return _TcpOutlet(self._store, self._served[channel], self._threads)

    async def connect(self, address: str) -> "_TcpConnection":
        """Raises LinkClosed also for a wrong key, and for certificates that either side does not take."""
        channels = Channels(partial(self._open, TcpAddress.parse(address)))
        channels.give_back(await channels.borrow(), reuse=True)
        return _TcpConnection(self._store, channels)

    async def close(self) -> None:
        """All threads are gone when it returns, and all sockets but those that somebody waits for: they go at once."""
        await self._admission.close()
        for channel in (*self._opened, *self._served.values()):
            channel.break_off()
        await self._threads.close()

    async def _open(self, address: TcpAddress) -> TcpChannel:
        sock, name = await greet(address, self._tls.client if self._tls else None, self._give_up)
        if self._threads.closed:
            sock.close()
            raise LinkClosed("this transport is closed")
        channel = TcpChannel(name, sock, self._threads, self._opened.discard)
        self._opened.add(channel)
        return channel

    async def _enter(self, name: bytes, sock: socket.socket) -> None:
        if name in self._served:
            sock.close()
            return
        self._served[name] = TcpChannel(name, sock, self._threads, self._leave)
        self._served[name].watch()

    def _leave(self, channel: TcpChannel) -> None:
        del self._served[channel.name]


class _TcpConnection:
    """See Connection."""

    def __init__(self, store: BlockStore, channels: Channels[TcpChannel]) -> None:
        self._store = store
        self._channels = channels

    async def inlet(self) -> "_TcpInlet":
        """On a channel of its own."""
        return _TcpInlet(self._store, await self._channels.borrow(), self._channels)

    async def close(self) -> None:
        """Nothing is mapped."""
        self._channels.close()


class _TcpOutlet:
    """See Outlet. `packed`: what Chunks have announced and is not sent yet."""

    def __init__(self, store: BlockStore, channel: TcpChannel, threads: Threads) -> None:
        self._store = store
        self._channel = channel
        self._threads = threads
        self._packed: deque[int] = deque()

    async def pack(self, blocks: Sequence[int]) -> Packed:
        """Reads the blocks once, in a thread; cancelled, it waits for that."""
        views = [self._store.read(block) for block in blocks]
        checksums = await self._threads.run(lambda: tuple(checksum(view) for view in views))
        number = self._channel.next_number()
        self._packed.append(number)
        return Packed(_NUMBER.pack(number), checksums)

    async def push(self, blocks: Sequence[int]) -> None:
        """One frame."""
        header = _HEADER.pack(self._packed[0], len(blocks) * self._store.layout.block_bytes)
        views = [self._store.read(block) for block in blocks]
        await self._channel.run(partial(send, pieces=(header, *views)))
        self._packed.popleft()

    def close(self) -> None:
        """A frame that was announced and not sent, or sent in part, breaks the channel."""
        if self._packed:
            self._channel.break_off()


class _TcpInlet:
    """See Inlet."""

    def __init__(self, store: BlockStore, channel: TcpChannel, channels: Channels[TcpChannel]) -> None:
        self.channel = channel.name
        self._store = store
        self._end = channel
        self._channels: Channels[TcpChannel] | None = channels

    async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
        """No copy in this process."""
        if len(payload) != _NUMBER.size:
            raise Corrupt(f"the number of a frame has {_NUMBER.size} bytes, {len(payload)} came")
        header = _HEADER.pack(*_NUMBER.unpack(payload), len(blocks) * self._store.layout.block_bytes)
        return await self._end.run(partial(_receive, header=header, store=self._store, blocks=blocks))

    def close(self, *, reuse: bool) -> None:
        """A channel that has broken is never used again, whatever `reuse` says."""
        if self._channels is not None:
            self._channels.give_back(self._end, reuse=reuse)
            self._channels = None


def _receive(sock: socket.socket, header: bytes, store: BlockStore, blocks: Sequence[int]) -> tuple[int, ...]:
    """Fill the blocks with the frame of this header. Each is hashed while it is in the core's cache. Raises Corrupt
    before anything is written when another frame came."""
    came = bytearray(_HEADER.size)
    receive_into(sock, memoryview(came))
    if came != header:
        (number, size), (found, came_size) = _HEADER.unpack(header), _HEADER.unpack(came)
        raise Corrupt(f"frame {number} of {size} bytes was announced, frame {found} of {came_size} bytes came")
    checksums = []
    for block in blocks:
        receive_into(sock, store.writable(block))
        checksums.append(checksum(store.read(block)))
    return tuple(checksums)

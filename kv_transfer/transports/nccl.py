"""Transport by communicators of two ranks: gloo between pools in host memory, NCCL between pools on GPUs.

A BlockStore lies in host memory, so what runs and is tested is gloo. NCCL would take its place in `_form`, the one
place that chooses: its process group is made and called in the same way, and its own abort works. Two GPUs are
unverified.

Each channel has a communicator, exclusive to one hand-over at a time. The ends meet by the key of the exporter's
address (admission.py), and on the socket where they met they tell each other where their ranks are: a TCPStore would
listen to everybody, and its clients wait for the name server to name each address, five seconds when it is silent. The
payload of a Chunk is its number on the channel and its count of blocks. A block is one message, so all messages have
one size: gloo ends the process that gets a longer one than it awaits, and one whose open files reach their limit. It
knows no key and does not encrypt: only for networks that are trusted.
"""

import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]  # star imports
from torch.utils.dlpack import from_dlpack

from contracts.config import TransferConfig
from contracts.errors import Corrupt, HandoverFailed
from contracts.kv import BlockStore
from kv_transfer.channels.admission import Admission
from kv_transfer.channels.channels import Channels
from kv_transfer.channels.group_channel import Group, GroupChannel
from kv_transfer.channels.tcp_channel import receive_into
from kv_transfer.channels.tcp_greeting import TcpAddress, greet
from kv_transfer.channels.threads import Threads
from kv_transfer.channels.word_sum import WordSum
from kv_transfer.transports.base import Packed, Transport
from protos.links.base import LinkClosed

_PAYLOAD = struct.Struct("<QI")
_ENTRY = struct.Struct("<QHH")
_EXPORTER, _PULLER = 0, 1  # ranks
_BLOCKS, _NOTHING = 0, 1  # tags
_MOST_STAGED = 8
_FORM_SECONDS = 2.0
"""Of each step of forming a group, of which there are few."""


def create(store: BlockStore, config: TransferConfig) -> Transport:
    """It opens nothing."""
    return _NcclTransport(store, config)


class _NcclTransport:
    """See Transport. `_ending`: the thread that aborts and frees groups, which takes milliseconds each."""

    def __init__(self, store: BlockStore, config: TransferConfig) -> None:
        self._store = store
        self._sum = WordSum(store.layout.block_bytes)
        self._staged = min(_MOST_STAGED, max(1, config.frame_bytes // store.layout.block_bytes))
        self._give_up = config.lease_seconds  # when no hand-over can be alive any more
        self._threads = Threads("nccl", 256)  # a frozen peer holds one until its lease ends
        self._ending = Threads("nccl-end", 1)
        self._admission = Admission(self._give_up, self._enter)
        self._opened: set[GroupChannel] = set()
        self._served: dict[bytes, GroupChannel] = {}

    async def serve(self, host: str) -> str:
        """The address holds a key, drawn at start."""
        return str(await self._admission.open(host))

    def outlet(self, channel: bytes) -> "_NcclOutlet":
        """Raises HandoverFailed also when the channel has broken."""
        if channel not in self._served:
            raise HandoverFailed("there is no such nccl channel here")
        return _NcclOutlet(self._store, self._sum, self._served[channel], self._threads)

    async def connect(self, address: str) -> "_NcclConnection":
        """Raises LinkClosed also for a wrong key, and when no communicator forms in time."""
        channels = Channels(partial(self._open, TcpAddress.parse(address)))
        channels.give_back(await channels.borrow(), reuse=True)
        return _NcclConnection(channels)

    async def close(self) -> None:
        """All groups, sockets and threads of ours are gone when it returns."""
        await self._admission.close()
        for channel in (*self._opened, *self._served.values()):
            channel.break_off()
        await self._threads.close()
        await self._ending.close()

    async def _open(self, address: TcpAddress) -> GroupChannel:
        sock, name = await greet(address, None, self._give_up)
        if self._threads.closed:
            sock.close()
            raise LinkClosed("this transport is closed")
        channel = GroupChannel(name, sock, self._threads, self._end, self._opened.discard)
        self._opened.add(channel)
        await channel.form(partial(self._form, _PULLER))
        return channel

    async def _enter(self, name: bytes, sock: socket.socket) -> None:
        if name in self._served:
            sock.close()
            return
        self._served[name] = channel = GroupChannel(name, sock, self._threads, self._end, self._leave)
        await channel.form(partial(self._form, _EXPORTER))
        channel.watch()

    def _form(self, rank: int, sock: socket.socket) -> Group:
        """Where the memory of the pool decides, see above."""
        return _GlooGroup(self._store, self._sum, self._staged, self._give_up, rank=rank, sock=sock)

    def _end(self, group: Group) -> None:
        if self._ending.closed:
            group.abort()  # it had been forming when the transport closed
            return
        self._ending.start(group.abort)

    def _leave(self, channel: GroupChannel) -> None:
        del self._served[channel.name]


class _NcclConnection:
    """See Connection."""

    def __init__(self, channels: Channels[GroupChannel]) -> None:
        self._channels = channels

    async def inlet(self) -> "_NcclInlet":
        """On a channel of its own."""
        return _NcclInlet(await self._channels.borrow(), self._channels)

    async def close(self) -> None:
        """Nothing is mapped."""
        self._channels.close()


class _NcclOutlet:
    """See Outlet. `unsent`: how many Chunks have been announced and not sent."""

    def __init__(self, store: BlockStore, word_sum: WordSum, channel: GroupChannel, threads: Threads) -> None:
        self._store = store
        self._sum = word_sum
        self._channel = channel
        self._threads = threads
        self._unsent = 0

    async def pack(self, blocks: Sequence[int]) -> Packed:
        """Reads the blocks once, in a thread; cancelled, it waits for that."""
        views = [self._store.read(block) for block in blocks]
        sums = await self._threads.run(lambda: tuple(map(self._sum.of, views)))
        self._unsent += 1
        return Packed(_PAYLOAD.pack(self._channel.next_number(), len(blocks)), sums)

    async def push(self, blocks: Sequence[int]) -> None:
        """From the pool, without a copy."""
        await self._channel.run(lambda group: group.send(blocks))
        self._unsent -= 1

    def close(self) -> None:
        """A Chunk that was announced and not sent, or sent in part, breaks the channel."""
        if self._unsent:
            self._channel.break_off()


class _NcclInlet:
    """See Inlet."""

    def __init__(self, channel: GroupChannel, channels: Channels[GroupChannel]) -> None:
        self.channel = channel.name
        self._end = channel
        self._channels: Channels[GroupChannel] | None = channels

    async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
        """Raises Corrupt before anything is written when it is not the Chunk whose blocks come next."""
        expected = _PAYLOAD.pack(self._end.next_number(), len(blocks))
        if payload != expected:
            raise Corrupt(
                f"chunk and count {expected.hex()} come next on the channel, {bytes(payload).hex()} was announced"
            )
        return await self._end.run(lambda group: group.receive(blocks))

    def close(self, *, reuse: bool) -> None:
        """A channel that has broken is never used again, whatever `reuse` says."""
        if self._channels is not None:
            self._channels.give_back(self._end, reuse=reuse)
            self._channels = None


class _Meeting(Store):
    """What the ranks of one channel tell each other, on its socket: torch calls it while it makes the group. An entry
    is the size of the teller's blocks and of key and value, key, value. Raises OSError also when the other end tells
    nothing in time, or has blocks of another size."""

    def __init__(self, sock: socket.socket, block_bytes: int) -> None:
        super().__init__()
        self._sock = sock
        self._block_bytes = block_bytes
        self._entries: dict[bytes, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # the stub says str, torch gives bytes
        """To both ends."""
        name = key.encode()
        self._entries[name] = value
        self._sock.sendall(_ENTRY.pack(self._block_bytes, len(name), len(value)) + name + value)

    def get(self, key: str) -> bytes:
        """Waits for it."""
        name = key.encode()
        while name not in self._entries:
            block_bytes, name_size, value_size = _ENTRY.unpack(self._receive(_ENTRY.size))
            if block_bytes != self._block_bytes:
                raise ConnectionError(f"block bytes: {self._block_bytes} here, {block_bytes} there")
            came = self._receive(name_size)
            self._entries[came] = self._receive(value_size)
        return self._entries[name]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """`get` does."""

    def _receive(self, size: int) -> bytes:
        came = bytearray(size)
        receive_into(self._sock, memoryview(came))
        return bytes(came)


class _GlooGroup:
    """See Group. At most `staged` blocks have been received and are not in the pool yet. `give_up`: seconds that one
    message may take. An abort ends what waits at once; but gloo forgets a send whose own write finds that the other end
    has closed, and it would wait for ever."""

    def __init__(
        self, store: BlockStore, word_sum: WordSum, staged: int, give_up: float, *, rank: int, sock: socket.socket
    ) -> None:
        self._store = store
        self._sum = word_sum
        self._limit = timedelta(seconds=give_up)
        self._peer = 1 - rank
        with _torch_errors():
            self._staging = torch.empty((staged, store.layout.block_bytes), dtype=torch.uint8)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub knows it as Options
            # at the address of this machine that the other end sees
            options._devices = [ProcessGroupGloo.create_device(hostname=sock.getsockname()[0])]
            options._threads = 0  # for collectives, which nobody calls
            options._timeout = timedelta(seconds=_FORM_SECONDS)
            sock.settimeout(_FORM_SECONDS)
            meeting = _Meeting(sock, store.layout.block_bytes)
            self._group: Any = ProcessGroupGloo(meeting, rank, 2, options)  # the stub has neither send nor recv
            sock.settimeout(None)

    def send(self, blocks: Sequence[int]) -> None:
        """Gloo reads the pool itself."""
        # dlpack as it takes memory that is read-only
        tensors = [from_dlpack(np.frombuffer(self._store.read(block), np.uint8)) for block in blocks]
        with _torch_errors():
            for work in [self._group.send([tensor], self._peer, _BLOCKS) for tensor in tensors]:
                work.wait(self._limit)

    def receive(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Only this thread writes into the pool: gloo knows the staging alone."""
        sums: list[int] = []
        with _torch_errors():
            coming = deque(self._receive(slot) for slot in self._staging[: len(blocks)])
            for block in blocks:
                slot, work = coming.popleft()
                work.wait(self._limit)
                np.copyto(np.frombuffer(self._store.writable(block), np.uint8), slot.numpy())
                if len(sums) + len(self._staging) < len(blocks):
                    coming.append(self._receive(slot))
                sums.append(self._sum.of(self._store.read(block)))
        return tuple(sums)

    def abort(self) -> None:
        """Gloo's own abort leaves waiting what waits. But when one receive has waited in vain, gloo closes the
        connection and fails everything that is pending."""
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NOTHING).wait(timedelta(milliseconds=1))

    def _receive(self, slot: torch.Tensor) -> tuple[torch.Tensor, Work]:
        return slot, self._group.recv([slot], self._peer, _BLOCKS)


@contextmanager
def _torch_errors() -> Iterator[None]:
    """What torch raises, as what a socket would."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error).splitlines()[0]) from error

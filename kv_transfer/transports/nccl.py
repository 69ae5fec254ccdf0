"""Transport by communicators of two ranks: gloo between pools in host memory, NCCL between pools on GPUs.

A BlockStore lies in host memory, so what runs and is tested is gloo. NCCL would take its place in `_form`, the one
place that chooses: its process group is made and called in the same way, and its own abort works. Two GPUs are
unverified.

Each channel has a communicator, exclusive to one hand-over at a time. The ends meet by the key of the exporter's
address (admission.py), then in a TCPStore that the exporter hosts. The payload of a Chunk is its number on the
channel and its count of blocks. A block is one message, so all messages have one size: gloo ends the process that gets
a longer one than it awaits. Neither the store nor gloo knows a key or encrypts: only for networks that are trusted.
"""

import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]  # star imports
from torch.utils.dlpack import from_dlpack

from contracts.config import TransferConfig
from contracts.errors import Corrupt, HandoverFailed, StartupError
from contracts.kv import BlockStore
from kv_transfer.channels.admission import Admission
from kv_transfer.channels.channels import Channels
from kv_transfer.channels.group_channel import Group, GroupChannel
from kv_transfer.channels.tcp_greeting import TcpAddress, greet, listen
from kv_transfer.channels.threads import Threads
from kv_transfer.channels.word_sum import WordSum
from kv_transfer.transports.base import Packed, Transport
from protos.links.base import LinkClosed

_PAYLOAD = struct.Struct("<QI")
_EXPORTER, _PULLER = 0, 1  # ranks
_BLOCKS, _NOTHING = 0, 1  # tags
_MOST_STAGED = 8
_FORM_TIME = timedelta(seconds=2)
_NO_LIMIT = timedelta(days=365)
"""Of one message. Whoever waits longer than a hand-over may last is cancelled, and the communicator aborted."""


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
        self._ending = ThreadPoolExecutor(1, thread_name_prefix="pdserve-nccl-end")
        self._admission = Admission(self._give_up, self._enter)
        self._meeting: TCPStore | None = None
        self._opened: set[GroupChannel] = set()
        self._served: dict[bytes, GroupChannel] = {}

    async def serve(self, host: str) -> str:
        """The address holds a key, drawn at start."""
        listener = await listen(host)
        bound, port = listener.getsockname()[:2]
        try:
            self._meeting = await self._threads.run(lambda: _host_store(bound, port, listener.detach()))
        except ConnectionError as error:
            raise StartupError(f"cannot host the store of transport nccl on {host}: {error}") from error
        return f"{await self._admission.open(host)}/{port}"

    def outlet(self, channel: bytes) -> "_NcclOutlet":
        """Raises HandoverFailed also when the channel has broken."""
        if channel not in self._served:
            raise HandoverFailed("there is no such nccl channel here")
        return _NcclOutlet(self._store, self._sum, self._served[channel], self._threads)

    async def connect(self, address: str) -> "_NcclConnection":
        """Raises LinkClosed also for a wrong key, and when no communicator forms in time."""
        place, _, port = address.rpartition("/")
        if not port.isdecimal():
            raise LinkClosed("this is no nccl address of an exporter")
        channels = Channels(partial(self._open, TcpAddress.parse(place), int(port)))
        channels.give_back(await channels.borrow(), reuse=True)
        return _NcclConnection(channels)

    async def close(self) -> None:
        """All groups, sockets and threads of ours are gone when it returns."""
        if self._threads.closed:
            return
        await self._admission.close()
        for channel in (*self._opened, *self._served.values()):
            channel.break_off()
        self._threads.close()
        self._ending.shutdown()
        self._meeting = None

    async def _open(self, address: TcpAddress, store_port: int) -> GroupChannel:
        sock, name = await greet(address, None, self._give_up)
        if self._threads.closed:
            sock.close()
            raise LinkClosed("this transport is closed")
        channel = GroupChannel(name, sock, self._threads, self._end, self._opened.discard)
        self._opened.add(channel)
        await channel.form(partial(self._form, _PULLER, _Meeting(address.host, store_port, name)))
        return channel

    async def _enter(self, name: bytes, sock: socket.socket) -> None:
        if self._meeting is None or name in self._served:
            sock.close()
            return
        self._served[name] = channel = GroupChannel(name, sock, self._threads, self._end, self._leave)
        channel.watch()
        await channel.form(partial(self._form, _EXPORTER, _Meeting(self._meeting.host, self._meeting.port, name)))

    def _form(self, rank: int, meeting: "_Meeting", own_host: str) -> Group:
        """Where the memory of the pool decides, see above."""
        return _GlooGroup(self._store, self._sum, self._staged, meeting, rank=rank, own_host=own_host)

    def _end(self, group: Group) -> None:
        if self._threads.closed:
            group.abort()  # it had been forming when the transport closed
            return
        self._ending.submit(group.abort).add_done_callback(Future.result)  # an error of ours must show

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


@dataclass(frozen=True, slots=True)
class _Meeting:
    """The store where the ranks of one channel find each other's addresses."""

    host: str
    port: int
    channel: bytes


class _GlooGroup:
    """See Group. At most `staged` blocks have been received and are not in the pool yet."""

    def __init__(
        self, store: BlockStore, word_sum: WordSum, staged: int, meeting: _Meeting, *, rank: int, own_host: str
    ) -> None:
        self._store = store
        self._sum = word_sum
        self._rank, self._peer = rank, 1 - rank
        self._staging = torch.empty((staged, store.layout.block_bytes), dtype=torch.uint8)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub knows it as Options
        options._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
        options._threads = 0  # for collectives, which nobody calls
        options._timeout = _FORM_TIME
        with _torch_errors():
            hosted = TCPStore(meeting.host, meeting.port, is_master=False, timeout=_FORM_TIME, wait_for_workers=False)
            # blocks of two sizes never meet
            self._meeting = PrefixStore(f"{meeting.channel.hex()}/{store.layout.block_bytes}", hosted)
            try:
                # the stub has neither send nor recv
                self._group: Any = ProcessGroupGloo(self._meeting, rank, 2, options)
            except RuntimeError:
                self._forget_addresses()
                raise

    def send(self, blocks: Sequence[int]) -> None:
        """Gloo reads the pool itself."""
        # dlpack as it takes memory that is read-only
        tensors = [from_dlpack(np.frombuffer(self._store.read(block), np.uint8)) for block in blocks]
        with _torch_errors():
            for work in [self._group.send([tensor], self._peer, _BLOCKS) for tensor in tensors]:
                work.wait(_NO_LIMIT)

    def receive(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Only this thread writes into the pool: gloo knows the staging alone."""
        sums: list[int] = []
        with _torch_errors():
            coming = deque(self._receive(slot) for slot in self._staging[: len(blocks)])
            for block in blocks:
                slot, work = coming.popleft()
                work.wait(_NO_LIMIT)
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
        self._forget_addresses()

    def _forget_addresses(self) -> None:
        """Gloo leaves them in the store. Not earlier, as each rank also waits for its own; and it is the exporter's
        store, which for the puller may be gone."""
        if self._rank == _EXPORTER:
            for rank in (_EXPORTER, _PULLER):
                self._meeting.delete_key(f"0/{rank}")

    def _receive(self, slot: torch.Tensor) -> tuple[torch.Tensor, Work]:
        return slot, self._group.recv([slot], self._peer, _BLOCKS)


def _host_store(host: str, port: int, listener: int) -> TCPStore:
    with _torch_errors():
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)


@contextmanager
def _torch_errors() -> Iterator[None]:
    """What torch raises, as what a socket would."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error).splitlines()[0]) from error

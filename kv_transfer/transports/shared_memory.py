"""Transport between processes of one host: the puller maps the exporter's pool read-only and copies from it.

The payload of a Chunk is the numbers of its blocks in the exporter's pool (little-endian uint32). Whatever the exporter
does to a block while it is copied shows in the checksum. Its pool stays mapped when it dies: the copy is whole or the
checksum differs.
"""

import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from contracts.config import TransferConfig
from contracts.errors import Corrupt, HandoverFailed, StartupError
from contracts.kv import SPARE_BLOCKS, BlockStore
from kv_transfer.channels.descriptor_desk import DescriptorDesk, DeskAddress, Shape, fetch_descriptor
from kv_transfer.channels.threads import Threads
from kv_transfer.frames import checksum
from kv_transfer.transports.base import Packed, Transport
from protos.links.base import LinkClosed

_MOST_THREADS = 4  # few cores already use up the bandwidth of memory
_NUMBER = np.dtype("<u4")


def create(store: BlockStore, config: TransferConfig) -> Transport:
    """It has no options."""
    return _SharedMemoryTransport(store)


class _SharedMemoryTransport:
    """See Transport."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._threads = Threads("shared-memory", _MOST_THREADS)
        self._outlet = _SharedMemoryOutlet(store, self._threads)
        self._desk: DescriptorDesk | None = None
        self._connections: set[_SharedMemoryConnection] = set()
        self._closed = False

    async def serve(self, host: str) -> str:
        """The address is good on this host only, whatever `host` says. It holds a key, drawn at start."""
        descriptor = self._store.descriptor
        if descriptor is None:
            raise StartupError("transport shared_memory needs a pool in memory that can be shared; choose another one")
        blocks = self._store.blocks + SPARE_BLOCKS
        self._desk = DescriptorDesk(descriptor, Shape(blocks, self._store.layout.block_bytes))
        return self._desk.address

    def outlet(self, channel: bytes) -> "_SharedMemoryOutlet":
        """Raises HandoverFailed when the Pull names a channel."""
        if channel:
            raise HandoverFailed("transport shared_memory has no channels")
        return self._outlet

    async def connect(self, address: str) -> "_SharedMemoryConnection":
        """Raises LinkClosed also for a wrong key, and for a file that is no such pool."""
        sock, descriptor, shape = await fetch_descriptor(DeskAddress.parse(address))
        try:
            self._check_open()
            mapping = _map(descriptor, shape, self._store.layout.block_bytes)
        except BaseException:
            sock.close()
            raise
        finally:
            os.close(descriptor)
        connection = _SharedMemoryConnection(self._store, self._threads, sock, mapping, self._connections.discard)
        self._connections.add(connection)
        return connection

    async def close(self) -> None:
        """No mapping, socket or thread of ours is left when it returns."""
        self._closed = True
        if self._desk is not None:
            await self._desk.close()
        for connection in tuple(self._connections):
            await connection.close()
        await self._threads.close()

    def _check_open(self) -> None:
        """Raises LinkClosed."""
        if self._closed:
            raise LinkClosed("this transport is closed")


class _SharedMemoryConnection:
    """See Connection. It owns the socket, which tells when the exporter is gone, and the mapping of its pool;
    `on_close` is called when both are closed."""

    def __init__(
        self,
        store: BlockStore,
        threads: Threads,
        sock: socket.socket,
        mapping: mmap.mmap,
        on_close: Callable[["_SharedMemoryConnection"], None],
    ) -> None:
        self._store = store
        self._threads = threads
        self._sock = sock
        self._mapping = mapping
        self._on_close = on_close
        self._copying = 0  # threads that read the mapping
        self._unused = asyncio.Event()
        self._unused.set()

    async def inlet(self) -> "_SharedMemoryInlet":
        """Raises LinkClosed when the exporter is gone."""
        self._check()
        return _SharedMemoryInlet(self)

    async def copy(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
        """See Inlet.accept."""
        self._check()
        there = len(self._mapping) // self._store.layout.block_bytes
        numbers = _numbers(payload, len(blocks), there=there)
        spaces = [self._store.writable(block) for block in blocks]
        self._copying += 1
        self._unused.clear()
        try:
            return await self._threads.run(partial(_copy, self._mapping, numbers, self._store, blocks, spaces))
        finally:
            self._copying -= 1
            if not self._copying:
                self._unused.set()

    async def close(self) -> None:
        """What is being copied is finished first; the mapping is gone when it returns."""
        self._sock.close()
        await self._unused.wait()
        if not self._mapping.closed:
            await self._threads.run(self._mapping.close)  # takes 20 ms for each GiB
        self._on_close(self)

    def _check(self) -> None:
        """Raises LinkClosed when either end is closed."""
        try:
            self._sock.recv(1)
        except BlockingIOError:
            return  # it never sends: all is well
        except OSError as error:
            raise LinkClosed(f"the connection is closed: {error}") from error
        raise LinkClosed("the exporter is gone")


class _SharedMemoryInlet:
    """See Inlet. It has no channel of its own: a copy disturbs no other."""

    channel = b""

    def __init__(self, connection: _SharedMemoryConnection) -> None:
        self._connection = connection

    async def accept(self, payload: bytes | memoryview, blocks: Sequence[int]) -> tuple[int, ...]:
        """One copy. Raises Corrupt before anything is written when a number is missing, or is none of the exporter's
        blocks."""
        return await self._connection.copy(payload, blocks)

    def close(self, *, reuse: bool) -> None:
        """Nothing is held."""


class _SharedMemoryOutlet:
    """See Outlet. One for all hand-overs: it has no state."""

    def __init__(self, store: BlockStore, threads: Threads) -> None:
        self._store = store
        self._threads = threads

    async def pack(self, blocks: Sequence[int]) -> Packed:
        """Reads the blocks once, in a thread; cancelled, it waits for that."""
        views = [self._store.read(block) for block in blocks]
        sums = await self._threads.run(lambda: tuple(map(checksum, views)))
        return Packed(np.array(blocks, _NUMBER).tobytes(), sums)

    async def push(self, blocks: Sequence[int]) -> None:
        """The puller fetches them."""

    def close(self) -> None:
        """Nothing is held."""


def _map(descriptor: int, shape: Shape, block_bytes: int) -> mmap.mmap:
    """Raises LinkClosed unless the file holds such blocks and can never shrink: to read behind its end would end this
    process."""
    if shape.block_bytes != block_bytes:
        raise LinkClosed(f"block bytes: {block_bytes} here, {shape.block_bytes} there")
    size = shape.blocks * shape.block_bytes
    try:
        found, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if found != size or not seals & fcntl.F_SEAL_SHRINK:
            raise LinkClosed(f"what came is no sealed file of {size} bytes: it has {found}, its seals are {seals}")
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise LinkClosed(f"the exporter's memory cannot be mapped: {error}") from error


def _numbers(payload: bytes | memoryview, count: int, *, there: int) -> list[int]:
    """Raises Corrupt unless the payload is so many numbers of the `there` blocks that the exporter has."""
    if len(payload) != count * _NUMBER.itemsize:
        raise Corrupt(f"the numbers of {count} blocks are {count * _NUMBER.itemsize} bytes, {len(payload)} came")
    numbers: list[int] = np.frombuffer(payload, _NUMBER).tolist()
    if max(numbers, default=0) >= there:
        raise Corrupt(f"block {max(numbers)} of {there} was announced")
    return numbers


def _copy(
    mapping: mmap.mmap, numbers: Sequence[int], store: BlockStore, blocks: Sequence[int], spaces: Sequence[memoryview]
) -> tuple[int, ...]:
    """Each block is hashed, as the pool holds it, right after its copy, while it is in the core's cache. No view of the
    mapping outlives the call."""
    source = np.frombuffer(mapping, np.uint8).reshape(-1, store.layout.block_bytes)
    sums = []
    for number, block, space in zip(numbers, blocks, spaces, strict=True):
        np.copyto(np.frombuffer(space, np.uint8), source[number])
        sums.append(checksum(store.read(block)))
    return tuple(sums)

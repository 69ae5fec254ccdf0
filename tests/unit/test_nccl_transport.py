"""Blocks over communicators of two ranks (gloo), both ends in one process. See also tests/conformance."""

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from contracts.config import TransferConfig
from contracts.errors import Corrupt, HandoverFailed
from contracts.kv import KvLayout
from kv_transfer.channels.group_channel import Group
from kv_transfer.channels.tcp_greeting import TcpAddress, greet
from kv_transfer.transports import nccl
from kv_transfer.transports.base import Connection, Inlet, Outlet
from kv_transfer.transports.nccl import _NcclInlet, _NcclOutlet, _NcclTransport
from protos.links.base import LinkClosed
from tests.helpers.handover import LAYOUT, ByteStore, settle

LARGE = replace(LAYOUT, head_dim=32_768)
"""Blocks of 4 MiB: two of them fill every buffer on the way."""


@dataclass(frozen=True, slots=True)
class Pair:
    here: ByteStore
    there: ByteStore
    exporter: _NcclTransport
    puller: _NcclTransport
    address: str
    connection: Connection

    async def hand_over(self, blocks: Sequence[int], into: Sequence[int], *, reuse: bool = True) -> bytes:
        """The channel's name."""
        inlet = await self.connection.inlet()
        outlet = self.exporter.outlet(inlet.channel)
        await self.send(outlet, inlet, blocks, into)
        outlet.close()
        inlet.close(reuse=reuse)
        return inlet.channel

    async def send(self, outlet: Outlet, inlet: Inlet, blocks: Sequence[int], into: Sequence[int]) -> None:
        packed = await outlet.pack(blocks)
        pushing = asyncio.create_task(outlet.push(blocks))
        assert await inlet.accept(packed.payload, into) == packed.checksums
        await pushing
        for source, target in zip(blocks, into, strict=True):
            assert self.there.data[target] == self.here.data[source]


@asynccontextmanager
async def paired(layout: KvLayout = LAYOUT, frame_blocks: int = 2, lease: float = 15.0) -> AsyncIterator[Pair]:
    here, there = ByteStore(16, layout=layout), ByteStore(16, layout=layout)
    for block, data in enumerate(here.data):
        data[:] = bytes([block + 1]) * len(data)
    config = TransferConfig(frame_bytes=frame_blocks * layout.block_bytes, lease_seconds=lease)
    exporter, puller = _NcclTransport(here, config), _NcclTransport(there, config)
    try:
        async with asyncio.timeout(20.0):  # what hangs shall fail
            address = await exporter.serve("127.0.0.1")
            connection = await puller.connect(address)
            yield Pair(here, there, exporter, puller, address, connection)
            await connection.close()
    finally:
        await puller.close()
        await exporter.close()


class Watched:
    """A group that tells when it is being used."""

    def __init__(self, group: Group, begun: Callable[[], object]) -> None:
        self._group = group
        self._begun = begun

    def send(self, blocks: Sequence[int]) -> None:
        self._begun()
        self._group.send(blocks)

    def receive(self, blocks: Sequence[int]) -> tuple[int, ...]:
        self._begun()
        return self._group.receive(blocks)

    def abort(self) -> None:
        self._group.abort()


def watch(end: Outlet | Inlet) -> asyncio.Event:
    """Set when a thread begins to send or receive on it."""
    assert isinstance(end, _NcclOutlet | _NcclInlet)
    channel = end._channel if isinstance(end, _NcclOutlet) else end._end
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    assert channel._group is not None
    channel._group = Watched(channel._group, lambda: loop.call_soon_threadsafe(begun.set))
    return begun


async def opened(pair: Pair) -> tuple[Outlet, Inlet]:
    """A hand-over of which one block has arrived, so that both ends are formed."""
    inlet = await pair.connection.inlet()
    outlet = pair.exporter.outlet(inlet.channel)
    await pair.send(outlet, inlet, [0], [0])
    return outlet, inlet


@pytest.mark.parametrize("frame_blocks", [1, 2, 16])
async def test_blocks_of_every_count_arrive(frame_blocks: int) -> None:
    async with paired(frame_blocks=frame_blocks) as pair:
        for count in (1, 2, 3, 9, 16):
            await pair.hand_over(range(count), range(16 - count, 16))


async def test_a_clean_hand_over_leaves_its_channel_to_the_next() -> None:
    async with paired() as pair:
        first = await pair.hand_over([1, 2], [3, 4])
        assert await pair.hand_over([5], [6]) == first
        assert await pair.hand_over([5], [6], reuse=False) == first
        assert await pair.hand_over([7], [8]) != first


async def test_hand_overs_at_one_time_have_channels_of_their_own() -> None:
    async with paired(LARGE) as pair:
        names = await asyncio.gather(*(pair.hand_over([2 * i, 2 * i + 1], [2 * i + 1, 2 * i]) for i in range(6)))
        assert len(set(names)) == 6


async def test_a_puller_that_gives_up_waiting_leaves_nothing_behind() -> None:
    async with paired() as pair:
        outlet, inlet = await opened(pair)
        begun, packed = watch(inlet), await outlet.pack([1])
        accepting = asyncio.create_task(inlet.accept(packed.payload, [1]))
        await begun.wait()
        accepting.cancel()
        await asyncio.wait({accepting})
        assert accepting.cancelled()
        with pytest.raises(LinkClosed):
            await outlet.push([1])
        assert pair.there.data[1] == bytes(LAYOUT.block_bytes)
        outlet.close()
        inlet.close(reuse=True)
        assert await pair.hand_over([1], [1]) != inlet.channel


async def test_a_puller_that_leaves_ends_what_is_being_sent() -> None:
    async with paired(LARGE) as pair:
        outlet, inlet = await opened(pair)
        begun = watch(outlet)
        await outlet.pack(range(8))
        pushing = asyncio.create_task(outlet.push(range(8)))
        await begun.wait()
        inlet.close(reuse=False)
        with pytest.raises(LinkClosed):
            await pushing
        with pytest.raises(HandoverFailed):
            pair.exporter.outlet(inlet.channel)
        await pair.hand_over([1], [1])


async def test_an_exporter_that_is_cancelled_while_nobody_takes_its_blocks_ends_both_sides() -> None:
    async with paired(LARGE) as pair:
        outlet, inlet = await opened(pair)
        begun, packed = watch(outlet), await outlet.pack(range(8))
        pushing = asyncio.create_task(outlet.push(range(8)))
        await begun.wait()
        pushing.cancel()
        await asyncio.wait({pushing})
        assert pushing.cancelled()
        outlet.close()
        with pytest.raises(LinkClosed):
            await inlet.accept(packed.payload, range(8))
        inlet.close(reuse=False)
        await pair.hand_over([1], [1])


async def test_a_message_that_nobody_takes_ends_with_the_lease() -> None:
    """Also when no abort reaches it."""
    async with paired(LARGE, lease=0.5) as pair:
        outlet, inlet = await opened(pair)
        await outlet.pack(range(8))
        with pytest.raises(LinkClosed):
            await outlet.push(range(8))
        outlet.close()
        inlet.close(reuse=False)
        await pair.hand_over([1], [1])


async def test_an_exporter_that_sends_less_than_it_announced_ends_the_wait_for_it() -> None:
    async with paired() as pair:
        outlet, inlet = await opened(pair)
        begun, packed = watch(inlet), await outlet.pack([1])
        accepting = asyncio.create_task(inlet.accept(packed.payload, [1]))
        await begun.wait()
        outlet.close()
        with pytest.raises(LinkClosed):
            await accepting


async def test_a_hand_over_that_ended_between_two_chunks_keeps_its_channel() -> None:
    async with paired() as pair:
        outlet, inlet = await opened(pair)
        inlet.close(reuse=True)
        again = await pair.connection.inlet()
        following = pair.exporter.outlet(again.channel)
        outlet.close()  # later than the next one came
        await pair.send(following, again, [3], [5])
        assert again.channel == inlet.channel


@pytest.mark.parametrize("change", [lambda p: p[:-1], lambda p: p + b"\0", lambda p: b"\7" + p[1:], lambda p: b""])
async def test_a_chunk_out_of_order_or_of_no_number_writes_nothing(change: Callable[[bytes], bytes]) -> None:
    async with paired() as pair:
        outlet, inlet = await opened(pair)
        packed = await outlet.pack([1])
        pair.there.writes.clear()
        with pytest.raises(Corrupt):
            await inlet.accept(change(packed.payload), [1])
        assert pair.there.writes == []


async def test_a_count_that_differs_is_corrupt() -> None:
    async with paired() as pair:
        outlet, inlet = await opened(pair)
        packed = await outlet.pack([1, 2])
        with pytest.raises(Corrupt):
            await inlet.accept(packed.payload, [1, 2, 3])


@pytest.mark.parametrize("bent", ["", "127.0.0.1:1", "127.0.0.1:1/00", "no/address"])
async def test_what_is_no_address_is_refused(bent: str) -> None:
    transport = _NcclTransport(ByteStore(2), TransferConfig())
    with pytest.raises(LinkClosed):
        await transport.connect(bent)
    await transport.close()


async def test_a_wrong_key_is_refused_and_opens_nothing() -> None:
    async with paired() as pair:
        place, key = pair.address.split("/")
        with pytest.raises(LinkClosed):
            await pair.puller.connect(f"{place}/{key[::-1]}")
        assert len(pair.exporter._served) == 1


async def test_blocks_of_two_sizes_never_meet() -> None:
    """Gloo would end the process that gets a longer message than it awaits."""
    exporter, puller = (_NcclTransport(ByteStore(2, layout=layout), TransferConfig()) for layout in (LAYOUT, LARGE))
    with pytest.raises(LinkClosed, match="block bytes: 4194304 here"):
        await puller.connect(await exporter.serve("127.0.0.1"))
    await puller.close()
    await exporter.close()


async def met(pair: Pair) -> socket.socket:
    """A puller that knows the key, and has not said yet where its rank is."""
    sock, _ = await greet(TcpAddress.parse(pair.address), None, 1.0)
    return sock


async def test_a_puller_that_forms_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with paired() as pair:
        monkeypatch.setattr(nccl, "_FORM_SECONDS", 0.1)
        with await met(pair) as silent:
            while await asyncio.get_running_loop().sock_recv(silent, 1000):
                pass  # the exporter's rank, then the end
        assert len(pair.exporter._served) == 1


@pytest.mark.parametrize("size", [LAYOUT.block_bytes, 0xFF])
async def test_a_puller_that_talks_nonsense_is_dropped_and_others_are_served(size: int) -> None:
    """Of its block size, too: then a name and a value that no rank has."""
    async with paired() as pair:
        with await met(pair) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, struct.pack("<QHH", size, 3, 5) + b"\xff" * 8)
            sock.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while await asyncio.get_running_loop().sock_recv(sock, 1000):
                    pass
        assert await pair.hand_over([1], [2])
        assert await pair.hand_over([3], [4], reuse=False)
        assert await pair.hand_over([5], [6])


async def test_nobody_listens_who_asks_for_no_key() -> None:
    """One listener, which asks for it. Those of gloo are there while there is a channel."""

    def listening() -> int:
        links = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        mine = {link[len("socket:[") : -1] for link in links if link.startswith("socket:")}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(row[3] == "0A" and row[9] in mine for row in rows)

    before = listening()
    transport = _NcclTransport(ByteStore(2), TransferConfig())
    await transport.serve("127.0.0.1")
    assert listening() == before + 1
    await transport.close()
    assert listening() == before


async def test_an_address_of_ipv6() -> None:
    exporter, puller = _NcclTransport(ByteStore(2), TransferConfig()), _NcclTransport(ByteStore(2), TransferConfig())
    address = await exporter.serve("::1")
    assert address.startswith("[::1]:")
    await (await puller.connect(address)).close()
    await puller.close()
    await exporter.close()


def test_no_thread_and_no_descriptor_stays() -> None:
    """But what torch opens once and keeps: the first store or group of a process leaves a pipe."""

    async def use() -> None:
        async with paired(LARGE) as pair:
            await asyncio.gather(*(pair.hand_over([i], [i]) for i in range(4)))
            outlet, inlet = await opened(pair)
            begun = watch(outlet)
            await outlet.pack(range(8))
            pushing = asyncio.create_task(outlet.push(range(8)))
            await begun.wait()
            pushing.cancel()
            await asyncio.wait({pushing})
            inlet.close(reuse=False)

    asyncio.run(use())
    before = held()
    for _ in range(5):
        asyncio.run(use())
    assert held() == before


def test_closing_at_any_moment_of_opening_leaves_nothing() -> None:
    async def use(turns: int) -> None:
        async with paired() as pair:
            first = await pair.connection.inlet()
            opening = asyncio.create_task(pair.connection.inlet())
            await settle(turns)
            await (pair.puller if turns % 2 else pair.exporter).close()
            await asyncio.wait({opening})
            if opening.exception() is None:
                opening.result().close(reuse=True)
            else:
                assert isinstance(opening.exception(), LinkClosed)
            first.close(reuse=True)

    asyncio.run(use(0))
    before = held()
    for turns in range(1, 40, 5):  # odd ones close the puller
        asyncio.run(use(turns))
    assert held() == before


def held() -> tuple[int, list[str], int]:
    """Threads of Python, threads of torch, open files. No garbage is collected: none should hold any of them."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # one of Python's that has just ended
            names.append((task / "comm").read_text().strip())
    torchs = sorted(name for name in names if name.startswith(("gloo", "pt_")))
    return threading.active_count(), torchs, len(list(Path("/proc/self/fd").iterdir()))

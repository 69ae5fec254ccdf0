"""What every transport of KV bytes must do."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from contracts.config import TransferConfig
from contracts.errors import Corrupt, HandoverFailed
from contracts.kv import KvLayout
from contracts.seams import load_plug, plugs
from engine.pool_memory import PoolMemory
from kv_transfer.transports.base import Connection, Inlet, Packed
from protos.links.base import LinkClosed
from tests.helpers.transport_ends import BLOCKS, LAST_SPARE, LAYOUT, TransportEnds, bounded, push_and_accept

ALL = range(BLOCKS)


@pytest.fixture(params=plugs("transport"))
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[TransportEnds]:
    """Closed afterwards, and no task is left then."""
    made = TransportEnds(request.param)
    with bounded():
        yield made
        await made.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left


async def connect(ends: TransportEnds) -> Connection:
    return await ends.puller.connect(await ends.exporter.serve("127.0.0.1"))


async def broken(inlet: Inlet, payload: bytes | memoryview, blocks: Sequence[int]) -> None:
    with pytest.raises(LinkClosed):
        await inlet.accept(payload, blocks)


@pytest.mark.parametrize(
    ("sources", "targets"),
    [([5], [5]), ([6, 0, 3], [1, 63, 2]), (ALL, ALL[::-1]), ([BLOCKS], [LAST_SPARE])],
    ids=["one", "scattered", "all", "spare"],
)
async def test_blocks_arrive_where_they_should_and_nowhere_else(
    ends: TransportEnds, sources: Sequence[int], targets: Sequence[int]
) -> None:
    inlet = await (await connect(ends)).inlet()
    await ends.move(ends.exporter.outlet(inlet.channel), inlet, sources, targets)
    others = np.delete(ends.there.array, list(targets), axis=0)
    assert not others.any()


async def test_many_chunks_on_one_channel_arrive_in_order(ends: TransportEnds) -> None:
    inlet = await (await connect(ends)).inlet()
    outlet = ends.exporter.outlet(inlet.channel)
    for number in range(40):
        first = number % (BLOCKS - 3)
        await ends.move(outlet, inlet, range(first, first + 1 + number % 3), range(1 + number % 3))


async def test_the_exporter_need_not_wait_for_the_puller(ends: TransportEnds) -> None:
    """The next chunk is packed and announced while the one before it is on its way."""
    inlet = await (await connect(ends)).inlet()
    outlet = ends.exporter.outlet(inlet.channel)
    announced: asyncio.Queue[Packed] = asyncio.Queue()

    async def export() -> None:
        for block in range(4):
            announced.put_nowait(await outlet.pack([block]))
            await outlet.push([block])

    exporting = asyncio.create_task(export())
    for block in range(4):
        packed = await announced.get()
        assert await inlet.accept(packed.payload, [block]) == packed.checksums
    await exporting
    assert np.array_equal(ends.there.array[:4], ends.here.array[:4])


async def test_two_inlets_of_one_connection_do_not_disturb_each_other(ends: TransportEnds) -> None:
    connection = await connect(ends)
    inlets = [await connection.inlet(), await connection.inlet()]

    async def hand_over(inlet: Inlet, blocks: Sequence[int]) -> None:
        outlet = ends.exporter.outlet(inlet.channel)
        for block in blocks:
            await ends.move(outlet, inlet, [block], [block])
        inlet.close(reuse=True)

    await asyncio.gather(hand_over(inlets[0], ALL[::2]), hand_over(inlets[1], ALL[1::2]))
    assert np.array_equal(ends.there.array[:BLOCKS], ends.here.array[:BLOCKS])


@pytest.mark.parametrize("reuse", [True, False])
async def test_a_connection_serves_one_hand_over_after_the_other(ends: TransportEnds, reuse: bool) -> None:
    connection = await connect(ends)
    for block in range(5):
        inlet = await connection.inlet()
        outlet = ends.exporter.outlet(inlet.channel)
        await ends.move(outlet, inlet, [block, block + 1], [block + 1, block])
        outlet.close()
        outlet.close()
        inlet.close(reuse=reuse)
        inlet.close(reuse=reuse)


async def test_what_a_hand_over_left_behind_is_not_taken_for_the_next(ends: TransportEnds) -> None:
    """A chunk is announced and neither sent nor accepted."""
    connection = await connect(ends)
    inlet = await connection.inlet()
    outlet = ends.exporter.outlet(inlet.channel)
    await outlet.pack([1])
    outlet.close()
    inlet.close(reuse=False)
    inlet = await connection.inlet()
    await ends.move(ends.exporter.outlet(inlet.channel), inlet, [2], [2])


@pytest.mark.parametrize("change", [lambda payload: payload[:-1], lambda payload: payload + b"x", lambda payload: b""])
async def test_a_payload_of_another_size_is_corrupt_and_writes_nothing(
    ends: TransportEnds, change: Callable[[bytes], bytes]
) -> None:
    inlet = await (await connect(ends)).inlet()
    packed = await ends.exporter.outlet(inlet.channel).pack([1, 2])
    with pytest.raises(Corrupt):
        await inlet.accept(change(packed.payload), [3, 4])
    assert not ends.there.array.any()


async def test_an_unknown_channel_is_refused(ends: TransportEnds) -> None:
    inlet = await (await connect(ends)).inlet()
    with pytest.raises(HandoverFailed):
        ends.exporter.outlet(b"no such channel")
    await ends.move(ends.exporter.outlet(inlet.channel), inlet, [1], [1])


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_accept_writes_no_more(ends: TransportEnds, turns: int) -> None:
    """At different moments. Whoever still wrote later would be seen: closing a transport ends its last thread."""
    connection = await connect(ends)
    inlet = await connection.inlet()
    outlet = ends.exporter.outlet(inlet.channel)
    packed = await outlet.pack(ALL)
    accepting = asyncio.create_task(inlet.accept(packed.payload, ALL))
    pushing = asyncio.create_task(outlet.push(ALL))
    for _ in range(turns):
        await asyncio.sleep(0)
    accepting.cancel()
    await asyncio.wait({accepting})
    ends.there.array[:] = 7
    inlet.close(reuse=False)
    await asyncio.wait({pushing})
    assert pushing.cancelled() or isinstance(pushing.exception(), LinkClosed | None)
    outlet.close()
    fresh = await connection.inlet()
    await ends.move(ends.exporter.outlet(fresh.channel), fresh, [3], [BLOCKS])
    await ends.puller.close()
    assert (np.delete(ends.there.array, BLOCKS, axis=0) == 7).all()


async def test_a_cancelled_push_or_pack_leaves_nobody_who_waits_in_vain(ends: TransportEnds) -> None:
    connection = await connect(ends)
    for method in ("pack", "push"):
        inlet = await connection.inlet()
        outlet = ends.exporter.outlet(inlet.channel)
        packed = await outlet.pack(ALL)
        task = asyncio.ensure_future(outlet.push(ALL) if method == "push" else outlet.pack(ALL))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        outlet.close()
        with suppress(LinkClosed):
            assert await inlet.accept(packed.payload, ALL) == packed.checksums
        inlet.close(reuse=False)


async def test_an_exporter_that_closes_breaks_the_connection(ends: TransportEnds) -> None:
    address = await ends.exporter.serve("127.0.0.1")
    connection = await ends.puller.connect(address)
    inlet, other = await connection.inlet(), await connection.inlet()
    packed = await ends.exporter.outlet(inlet.channel).pack([1])
    accepting = asyncio.create_task(inlet.accept(packed.payload, [1]))
    await asyncio.sleep(0)
    await ends.exporter.close()
    await asyncio.wait({accepting})
    if isinstance(accepting.exception(), LinkClosed):
        assert not ends.there.read(1).tobytes().strip(b"\0")
    else:
        assert accepting.result() == packed.checksums
    if address:  # else the link is enough, and breaks
        await broken(other, packed.payload, [2])
        with pytest.raises(LinkClosed):
            await connection.inlet()
        with pytest.raises(LinkClosed):
            await ends.puller.connect(address)


async def test_a_connection_that_is_closed_is_of_no_use(ends: TransportEnds) -> None:
    address = await ends.exporter.serve("127.0.0.1")
    connection, other = await ends.puller.connect(address), await ends.puller.connect(address)
    inlet = await connection.inlet()
    packed = await ends.exporter.outlet(inlet.channel).pack([1])
    await connection.close()
    await connection.close()
    if address:
        await broken(inlet, packed.payload, [1])
        with pytest.raises(LinkClosed):
            await connection.inlet()
    inlet.close(reuse=True)
    inlet = await other.inlet()
    await ends.move(ends.exporter.outlet(inlet.channel), inlet, [2], [2])


async def test_closing_a_connection_ends_what_is_being_received(ends: TransportEnds) -> None:
    connection = await connect(ends)
    inlet = await connection.inlet()
    packed = await ends.exporter.outlet(inlet.channel).pack(ALL)
    accepting = asyncio.create_task(inlet.accept(packed.payload, ALL))
    await asyncio.sleep(0)
    await connection.close()
    await asyncio.wait({accepting})
    if not isinstance(accepting.exception(), LinkClosed):
        assert accepting.result() == packed.checksums


async def test_only_the_whole_address_opens(ends: TransportEnds) -> None:
    address = await ends.exporter.serve("127.0.0.1")
    if not address:
        return  # nothing to connect to
    key = re.search("[0-9a-f]{32,}", address)
    assert key
    wrong_key = address.replace(key[0], "".join(f"{15 - int(digit, 16):x}" for digit in key[0]))
    for wrong in (wrong_key, address.replace(key[0], ""), "", "nonsense", f"nobody/{'0' * 32}", "127.0.0.1:1/zz"):
        with pytest.raises(LinkClosed):
            await ends.puller.connect(wrong)
    inlet = await (await ends.puller.connect(address)).inlet()
    await ends.move(ends.exporter.outlet(inlet.channel), inlet, [1], [1])


async def test_close_twice_also_of_what_was_never_used(ends: TransportEnds) -> None:
    await ends.puller.close()
    await ends.puller.close()
    await connect_refused(ends)
    await ends.exporter.close()
    await ends.exporter.close()


async def connect_refused(ends: TransportEnds) -> None:
    """By a puller that is closed itself."""
    address = await ends.exporter.serve("127.0.0.1")
    if address:
        with pytest.raises(LinkClosed):
            await ends.puller.connect(address)


async def test_every_flipped_bit_on_the_way_is_found(ends: TransportEnds) -> None:
    """1,000 times one bit, after the checksum was made: in the payload, or in what is sent beside it."""
    inlet = await (await connect(ends)).inlet()
    outlet = ends.exporter.outlet(inlet.channel)
    random, size = np.random.default_rng(11), LAYOUT.block_bytes
    found = 0
    for _ in range(1000):
        block, byte, bit = int(random.integers(BLOCKS)), int(random.integers(size)), 1 << int(random.integers(8))
        packed = await outlet.pack([block])
        payload = bytearray(packed.payload)
        flipped = payload if len(payload) == size else ends.here.writable(block)
        flipped[byte] ^= bit
        sums = await push_and_accept(outlet, inlet, bytes(payload), [block], [block])
        found += sums != packed.checksums
        if flipped is not payload:
            flipped[byte] ^= bit
    assert found == 1000


class BadMemory:
    """A pool whose memory loses a bit of each block before it is read back."""

    descriptor = None

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.blocks = BLOCKS
        self._good = PoolMemory(layout, BLOCKS)
        self._random = np.random.default_rng(13)

    def read(self, block: int) -> memoryview:
        byte, bit = int(self._random.integers(self.layout.block_bytes)), 1 << int(self._random.integers(8))
        self._good.writable(block)[byte] ^= bit
        return self._good.read(block)

    def writable(self, block: int) -> memoryview:
        return self._good.writable(block)

    def close(self) -> None:
        self._good.close()


async def test_the_checksums_are_of_what_the_pool_holds(ends: TransportEnds, request: pytest.FixtureRequest) -> None:
    """Read back from the store, not of what came."""
    plug = request.node.callspec.params["ends"]
    store = BadMemory(LAYOUT)
    puller = load_plug("transport", plug).create(store, TransferConfig(transport=plug))
    try:
        inlet = await (await puller.connect(await ends.exporter.serve("127.0.0.1"))).inlet()
        outlet = ends.exporter.outlet(inlet.channel)
        packed = await outlet.pack(ALL)
        sums = await push_and_accept(outlet, inlet, packed.payload, ALL, ALL)
    finally:
        await puller.close()
        store.close()
    assert all(mine != theirs for mine, theirs in zip(sums, packed.checksums, strict=True))


def left_behind() -> tuple[int, list[str], list[str]]:
    """Open files, mapped pools, threads; not the loop's own threads, which look up names and stay for the next."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    threads = sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_"))
    return len(list(Path("/proc/self/fd").iterdir())), mapped, threads


@pytest.mark.parametrize("plug", plugs("transport"))
async def test_nothing_is_left_after_close(plug: str) -> None:
    async def use() -> None:
        ends = TransportEnds(plug)
        connection = await connect(ends)
        for _ in range(3):
            inlet = await connection.inlet()
            await ends.move(ends.exporter.outlet(inlet.channel), inlet, range(8), range(8))
            inlet.close(reuse=False)
        await connection.inlet()  # nobody closes it
        await ends.close()

    await use()  # so that what is made once for the process is there
    before = left_behind()
    for _ in range(3):
        await use()
    assert left_behind() == before

"""What every transport of KV bytes must do."""

from contextlib import suppress

import pytest

from contracts.errors import Corrupt
from contracts.seams import load_plug, plugs
from kv_transfer.transports.base import Transport
from tests.helpers.handover import LAYOUT, ByteStore


@pytest.fixture(params=plugs("transport"))
def transport(request: pytest.FixtureRequest) -> Transport:
    plug: Transport = load_plug("transport", request.param).create()
    return plug


def numbered() -> ByteStore:
    store = ByteStore(8)
    for block, data in enumerate(store.data):
        data[:] = bytes((block * 37 + i) % 256 for i in range(len(data)))
    return store


async def test_blocks_arrive_where_they_should_and_nowhere_else(transport: Transport) -> None:
    here, there = numbered(), ByteStore(8, fill=255)
    await transport.unpack(await transport.pack(here, [6, 0, 3]), there, [1, 7, 2])
    assert [there.data[b] for b in (1, 7, 2)] == [here.data[b] for b in (6, 0, 3)]
    assert all(there.data[b] == bytes([255]) * LAYOUT.block_bytes for b in (0, 3, 4, 5, 6))


async def test_a_payload_keeps_its_content_when_the_block_changes(transport: Transport) -> None:
    here, there = numbered(), ByteStore(8)
    before = bytes(here.data[4])
    payload = await transport.pack(here, [4])
    here.write(4, bytes(LAYOUT.block_bytes))
    await transport.unpack(payload, there, [0])
    assert there.data[0] == before


@pytest.mark.parametrize("cut", [1, LAYOUT.block_bytes])
async def test_a_payload_of_the_wrong_size_is_corrupt_and_writes_nothing(transport: Transport, cut: int) -> None:
    here, there = numbered(), ByteStore(8, fill=255)
    payload = await transport.pack(here, [1, 2])
    with pytest.raises(Corrupt):
        await transport.unpack(payload[:-cut], there, [3, 4])
    assert there.writes == []


async def test_damage_is_carried_and_not_repaired(transport: Transport) -> None:
    """Finding damage is the receiver's task; a transport may also refuse it."""
    here, there = numbered(), ByteStore(8)
    payload = bytearray(await transport.pack(here, [1]))
    payload[5] ^= 1
    with suppress(Corrupt):
        await transport.unpack(bytes(payload), there, [1])
    assert there.data[1] != here.data[1]

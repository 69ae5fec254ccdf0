"""The desk gives the descriptor to those with the key and to nobody else."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kv_transfer.channels.descriptor_desk import DescriptorDesk, DeskAddress, Shape, fetch_descriptor
from kv_transfer.channels.sockets import GREETING_SECONDS, KEY_BYTES
from protos.links.base import LinkClosed
from tests.helpers.handover import settle

SHAPE = Shape(3, 1000)


@pytest.fixture
async def desk() -> AsyncIterator[DescriptorDesk]:
    descriptor = os.memfd_create("test")
    made = DescriptorDesk(descriptor, SHAPE)
    yield made
    await made.close()
    await made.close()
    os.close(descriptor)


async def connected(desk: DescriptorDesk) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, DeskAddress.parse(desk.address).path)
    return sock


async def end_of(sock: socket.socket) -> bytes:
    """Everything that comes before the other side closes; also what is no byte, like a descriptor, would show here."""
    loop = asyncio.get_running_loop()
    came = b""
    try:
        while more := await loop.sock_recv(sock, 100):
            came += more
    except ConnectionResetError:
        pass
    sock.close()
    return came


async def test_the_key_opens_and_the_file_is_the_same(desk: DescriptorDesk) -> None:
    sock, descriptor, shape = await fetch_descriptor(DeskAddress.parse(desk.address))
    assert shape == SHAPE
    assert Path(f"/proc/self/fd/{descriptor}").readlink() == Path("/memfd:test (deleted)")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    await desk.close()
    assert await end_of(sock) == b""  # it tells that the exporter is gone


async def test_a_wrong_key_gets_nothing(desk: DescriptorDesk) -> None:
    right = DeskAddress.parse(desk.address).key
    for wrong in (bytes(KEY_BYTES), right[:-1] + bytes([right[-1] ^ 1])):
        sock = await connected(desk)
        sock.send(wrong)
        assert await end_of(sock) == b""
        with pytest.raises(LinkClosed):
            await fetch_descriptor(DeskAddress(DeskAddress.parse(desk.address).name, wrong))


async def test_a_key_may_come_in_pieces(desk: DescriptorDesk) -> None:
    sock = await connected(desk)
    key = DeskAddress.parse(desk.address).key
    sock.send(key[:5])
    await settle()
    sock.send(key[5:])
    assert len(await asyncio.get_running_loop().sock_recv(sock, 100)) == 16
    sock.close()


async def test_strangers_who_say_nothing_are_dropped_and_keep_nobody_out_for_long(desk: DescriptorDesk) -> None:
    """More of them than may be in their greeting at one time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    silent = [await connected(desk) for _ in range(70)]
    for sock in silent[:64]:
        assert await end_of(sock) == b""
    assert loop.time() - began >= GREETING_SECONDS * 0.9
    sock, descriptor, _ = await fetch_descriptor(DeskAddress.parse(desk.address))
    os.close(descriptor)
    sock.close()
    for sock in silent[64:]:
        sock.close()


async def test_an_exporter_that_does_not_answer_is_given_up() -> None:
    address = DeskAddress("pdserve-test-silent", bytes(KEY_BYTES))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address.path)
        listener.listen()
        with pytest.raises(LinkClosed, match="TimeoutError"):
            await fetch_descriptor(address)


@pytest.mark.parametrize(("answer", "descriptors"), [(bytes(16), []), (bytes(7), [0])])
async def test_half_an_answer_is_refused_and_leaves_nothing(answer: bytes, descriptors: list[int]) -> None:
    address = DeskAddress(f"pdserve-test-{len(answer)}", bytes(KEY_BYTES))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address.path)
        listener.listen()
        fetching = asyncio.create_task(fetch_descriptor(address))
        await asyncio.sleep(0)
        peer, _ = listener.accept()
        with peer:
            socket.send_fds(peer, [answer], descriptors)
            with pytest.raises(LinkClosed):
                await fetching
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_the_key_is_not_in_what_is_printed(desk: DescriptorDesk) -> None:
    address = DeskAddress.parse(desk.address)
    assert address.key.hex() not in repr(address)
    with pytest.raises(LinkClosed) as refused:
        await fetch_descriptor(DeskAddress("nobody", address.key))
    assert address.key.hex() not in str(refused.value)

"""The tcp transport: what arrives, what breaks a channel, whom it refuses."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from contracts.config import TransferConfig
from contracts.errors import Corrupt, HandoverFailed, StartupError
from kv_transfer.channels import tcp_greeting
from kv_transfer.channels.tcp_greeting import TcpAddress
from kv_transfer.transports import tcp
from protos.links.base import LinkClosed
from tests.helpers.handover import ByteStore
from tests.helpers.tcp_pair import MIB, STUCK, Pair, certificates, chunk, connected
from tests.helpers.transport_ends import bounded

PLAIN = TransferConfig()


@pytest.fixture(params=["plain", "tls"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    with bounded():
        async with connected(certificates(tmp_path) if request.param == "tls" else PLAIN) as pair:
            yield pair


async def hand_over(pair: Pair, rounds: int = 3) -> None:
    outlet, inlet = await pair.open()
    for _ in range(rounds):
        await chunk(outlet, [2, 0], inlet, [1, 3])
    outlet.close()
    inlet.close(reuse=True)
    assert (pair.there.data[1], pair.there.data[3]) == (pair.here.data[2], pair.here.data[0])


async def get_stuck(pair: Pair) -> tuple[bytes, asyncio.Task[None]]:
    """A channel whose puller reads nothing, and the push that waits for it."""
    outlet, inlet = await pair.open()
    await outlet.pack(STUCK)
    stuck = asyncio.create_task(outlet.push(STUCK))
    await asyncio.sleep(0)  # it begins
    return inlet.channel, stuck


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def breaks(waiting: Awaitable[Any]) -> None:
    with pytest.raises(LinkClosed):
        async with asyncio.timeout(20):
            await waiting


async def cancel_a_push(pair: Pair) -> None:
    channel, stuck = await get_stuck(pair)
    await hand_over(pair)  # the slow one holds nobody up
    await cancel(stuck)
    with pytest.raises(HandoverFailed, match="no such"):
        pair.exporter.outlet(channel)


async def cancel_an_accept(pair: Pair) -> None:
    _, inlet = await pair.open()
    waiting = asyncio.create_task(inlet.accept(bytes(8), [0]))
    await asyncio.sleep(0)
    await cancel(waiting)
    with pytest.raises(LinkClosed):
        await inlet.accept(bytes(8), [0])
    inlet.close(reuse=True)
    await hand_over(pair)  # on another channel, whatever `reuse` says


async def test_blocks_arrive_and_the_channel_serves_again(pair: Pair) -> None:
    first = (await pair.connection.inlet()).channel
    names = set()
    for _ in range(3):
        await hand_over(pair)
        inlet = await pair.connection.inlet()
        names.add(inlet.channel)
        inlet.close(reuse=True)
    assert len(names | {first}) == 2


async def test_a_frozen_puller_holds_up_nobody_and_a_push_can_be_cancelled(pair: Pair) -> None:
    await cancel_a_push(pair)


async def test_an_accept_can_be_cancelled(pair: Pair) -> None:
    await cancel_an_accept(pair)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("scenario", [hand_over, cancel_a_push, cancel_an_accept])
def test_on_the_loop_of_a_worker(
    scenario: Callable[[Pair], Coroutine[None, None, None]], tls: bool, tmp_path: Path
) -> None:
    """uvloop turns off the blocking of each socket that it watches."""

    async def run() -> None:
        async with connected(certificates(tmp_path) if tls else PLAIN) as pair:
            await scenario(pair)

    uvloop.run(run())


async def test_half_a_frame_is_never_taken_for_the_whole(pair: Pair) -> None:
    outlet, inlet = await pair.open()
    packed = await outlet.pack(STUCK)
    sending = asyncio.create_task(outlet.push(STUCK))
    await asyncio.sleep(0)
    await cancel(sending)
    outlet.close()
    await breaks(inlet.accept(packed.payload, STUCK))


async def test_a_chunk_that_was_announced_and_not_sent_breaks_the_channel(pair: Pair) -> None:
    outlet, inlet = await pair.open()
    packed = await outlet.pack([1])
    outlet.close()
    outlet.close()
    await breaks(inlet.accept(packed.payload, [1]))
    with pytest.raises(HandoverFailed):
        pair.exporter.outlet(inlet.channel)


async def test_two_outlets_on_one_channel_cannot_mix_their_bytes(pair: Pair) -> None:
    outlet, inlet = await pair.open()
    twin = pair.exporter.outlet(inlet.channel)
    announced = await outlet.pack([1])
    await twin.pack([2])
    other = asyncio.create_task(twin.push([2]))
    with pytest.raises(Corrupt, match="frame 0 of 1048576 bytes was announced, frame 1"):
        await inlet.accept(announced.payload, [3])
    await asyncio.wait({other})
    assert pair.there.data[3] == bytes(MIB.block_bytes)
    with pytest.raises(LinkClosed):
        await inlet.accept(announced.payload, [3])


async def test_frames_of_two_outlets_are_each_whole(pair: Pair) -> None:
    outlet, inlet = await pair.open()
    twin = pair.exporter.outlet(inlet.channel)
    chunks = [(end, await end.pack(blocks), blocks) for end, blocks in ((outlet, STUCK), (twin, [1, 2]))]
    async with asyncio.TaskGroup() as tasks:
        for end, _, blocks in chunks:
            tasks.create_task(end.push(blocks))
        for _, packed, blocks in chunks:
            assert await inlet.accept(packed.payload, blocks) == packed.checksums


@pytest.mark.parametrize("size", [0, 7, 9])
async def test_what_is_no_number_of_a_frame_is_corrupt(pair: Pair, size: int) -> None:
    _, inlet = await pair.open()
    with pytest.raises(Corrupt, match="8 bytes"):
        await inlet.accept(bytes(size), [0])


async def test_another_size_than_announced_is_corrupt(pair: Pair) -> None:
    outlet, inlet = await pair.open()
    packed = await outlet.pack([1, 2])
    sending = asyncio.create_task(outlet.push([1, 2]))
    with pytest.raises(Corrupt, match="frame 0 of 1048576 bytes was announced, frame 0 of 2097152"):
        await inlet.accept(packed.payload, [1])
    await asyncio.wait({sending})
    assert pair.there.data[1] == bytes(MIB.block_bytes)


async def test_many_at_one_time(pair: Pair) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(40):
            tasks.create_task(hand_over(pair, rounds=1))


async def test_an_idle_channel_that_ended_is_replaced_and_the_exporter_forgets_it(pair: Pair) -> None:
    outlet, inlet = await pair.open()
    inlet.close(reuse=True)
    await outlet.pack([0])
    outlet.close()
    other = await pair.connection.inlet()
    assert other.channel != inlet.channel
    other.close(reuse=False)
    await pair.puller.connect(pair.address)  # until then the exporter has seen the end
    with pytest.raises(HandoverFailed):
        pair.exporter.outlet(other.channel)


async def test_closing_the_exporter_ends_what_waits(pair: Pair) -> None:
    _, stuck = await get_stuck(pair)
    _, inlet = await pair.open()
    waiting = asyncio.create_task(inlet.accept(bytes(8), [0]))
    await asyncio.sleep(0)
    outlet, _ = await pair.open()
    await pair.exporter.close()
    for task in (stuck, waiting):
        await breaks(task)
    with pytest.raises(LinkClosed, match="closed"):
        await outlet.pack([0])
    with pytest.raises(LinkClosed):
        await pair.connection.inlet()
    with pytest.raises(LinkClosed):
        await pair.puller.connect(pair.address)


async def test_closing_the_puller_ends_what_waits(pair: Pair) -> None:
    _, stuck = await get_stuck(pair)
    _, inlet = await pair.open()
    waiting = asyncio.create_task(inlet.accept(bytes(8), [0]))
    await asyncio.sleep(0)
    await pair.puller.close()
    for task in (stuck, waiting):
        await breaks(task)
    with pytest.raises(LinkClosed, match="closed"):
        await pair.puller.connect(pair.address)


@pytest.mark.parametrize(("host", "shown"), [("::1", "[::1]:"), ("localhost", "")])
async def test_hosts(host: str, shown: str) -> None:
    async with connected(PLAIN, host) as pair:
        assert pair.address.startswith(shown)
        await hand_over(pair)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
async def test_a_host_that_is_not_ours(host: str) -> None:
    transport = tcp.create(ByteStore(), PLAIN)
    with pytest.raises(StartupError, match=host):
        await transport.serve(host)
    await transport.close()


@pytest.mark.parametrize(
    "address",
    ["", "nowhere", "127.0.0.1:1", "127.0.0.1:1/zz", "127.0.0.1:1/00", "name:1/" + "00" * 16]
    + [f"127.0.0.1:{port}/{'00' * 16}" for port in ("", "x", "0", "65536", "1")],
)
async def test_addresses_at_which_no_exporter_is(address: str) -> None:
    transport = tcp.create(ByteStore(), PLAIN)
    with pytest.raises(LinkClosed):
        await transport.connect(address)
    await transport.close()


async def test_a_wrong_key_is_refused(pair: Pair) -> None:
    place, _, key = pair.address.partition("/")
    wrong = f"{int(key[0], 16) ^ 1:x}{key[1:]}"
    with pytest.raises(LinkClosed):
        await pair.puller.connect(f"{place}/{wrong}")
    await hand_over(pair)


def strangers(pair: Pair) -> list[socket.socket]:
    at = TcpAddress.parse(pair.address)
    strangers = [socket.create_connection((at.host, at.port)) for _ in range(5)]
    strangers[1].sendall(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n")
    strangers[2].sendall(at.key)
    strangers[3].sendall(bytes(31))
    for stranger in strangers:
        stranger.setblocking(False)
    return strangers


async def test_strangers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(PLAIN) as pair:
        monkeypatch.setattr(tcp_greeting, "GREETING_SECONDS", 0.2)
        for stranger in strangers(pair):
            with stranger:
                assert await ended(asyncio.get_running_loop(), stranger)


async def test_strangers_hold_up_nobody(pair: Pair) -> None:
    waiting = strangers(pair)
    await pair.puller.connect(pair.address)
    await hand_over(pair)
    await pair.exporter.close()
    for stranger in waiting:
        with stranger:
            assert await ended(asyncio.get_running_loop(), stranger)


async def ended(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bool:
    """Nothing is said to it before its end."""
    try:
        return await loop.sock_recv(sock, 1) == b""
    except ConnectionResetError:
        return True


async def test_whoever_answers_must_be_an_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_greeting, "GREETING_SECONDS", 0.2)
    transport = tcp.create(ByteStore(), PLAIN)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        with pytest.raises(LinkClosed, match="Timeout"):
            await transport.connect(str(TcpAddress(host, port, bytes(16))))
        silent.setblocking(False)
        connecting = asyncio.create_task(transport.connect(str(TcpAddress(host, port, bytes(16)))))
        loop = asyncio.get_running_loop()
        for _ in range(2):  # the first is the one that was given up
            sock, _ = await loop.sock_accept(silent)
            with sock:
                await loop.sock_sendall(sock, b"SSH-2.0-OpenSSH_9")
        with pytest.raises(LinkClosed):
            await connecting
    await transport.close()

"""The tcp transport between real processes: kill -9 and SIGSTOP in the middle of a frame."""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import pytest

from contracts.config import TransferConfig
from contracts.errors import HandoverFailed
from kv_transfer.transports import tcp
from kv_transfer.transports.base import Transport
from protos.links.base import LinkClosed
from tests.helpers.handover import ByteStore
from tests.helpers.tcp_pair import MIB, STUCK, filled

EXPORTER = """
import asyncio, sys, uvloop
from contracts.config import TransferConfig
from kv_transfer.transports import tcp
from tests.helpers.tcp_pair import STUCK, filled

async def main():
    exporter = tcp.create(filled(), TransferConfig())
    print(await exporter.serve("127.0.0.1"), flush=True)
    outlet = exporter.outlet(bytes.fromhex(await asyncio.to_thread(sys.stdin.readline)))
    await outlet.pack([1])
    await outlet.push([1])
    await outlet.pack(STUCK)
    print("pushes", flush=True)
    await outlet.push(STUCK)

uvloop.run(main())
"""
PULLER = """
import asyncio, struct, sys, uvloop
from contracts.config import TransferConfig
from kv_transfer.transports import tcp
from tests.helpers.handover import ByteStore
from tests.helpers.tcp_pair import MIB

async def main():
    puller = tcp.create(ByteStore(4, layout=MIB), TransferConfig())
    connection = await puller.connect(sys.argv[1])
    inlet = await connection.inlet()
    print(inlet.channel.hex(), flush=True)
    await inlet.accept(struct.pack("<Q", 0), [1])
    print("accepted", flush=True)
    await asyncio.Event().wait()

uvloop.run(main())
"""


@contextlib.asynccontextmanager
async def running(program: str, *arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *arguments, stdin=PIPE, stdout=PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@pytest.fixture
async def transport() -> AsyncIterator[Transport]:
    """Of this process, on either side."""
    transport = tcp.create(filled(), TransferConfig())
    yield transport
    await transport.close()


async def line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_exporter_that_dies_or_freezes_in_the_middle_of_a_frame(transport: Transport, end: int) -> None:
    async with running(EXPORTER) as exporter, asyncio.timeout(60):
        connection = await transport.connect(await line(exporter))
        inlet = await connection.inlet()
        assert exporter.stdin is not None
        exporter.stdin.write(f"{inlet.channel.hex()}\n".encode())
        await inlet.accept(bytes(8), [1])
        assert await line(exporter) == "pushes"
        exporter.send_signal(end)
        accepting = asyncio.create_task(inlet.accept((1).to_bytes(8, "little"), STUCK))
        if end == signal.SIGKILL:
            with pytest.raises(LinkClosed):
                await accepting
            with pytest.raises(LinkClosed):
                await connection.inlet()
        else:
            await asyncio.sleep(0)
            accepting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await accepting
        inlet.close(reuse=False)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_puller_that_dies_or_freezes_in_the_middle_of_a_frame(transport: Transport, end: int) -> None:
    address = await transport.serve("127.0.0.1")
    async with running(PULLER, address) as puller, asyncio.timeout(60):
        channel = bytes.fromhex(await line(puller))
        outlet = transport.outlet(channel)
        await outlet.pack([1])
        await outlet.push([1])
        assert await line(puller) == "accepted"
        await outlet.pack(STUCK)
        pushing = asyncio.create_task(outlet.push(STUCK))
        puller.send_signal(end)
        if end == signal.SIGKILL:
            with pytest.raises(LinkClosed):
                await pushing
        else:
            await asyncio.sleep(0)
            pushing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pushing
        outlet.close()
        with pytest.raises(HandoverFailed):
            transport.outlet(channel)


async def test_a_puller_that_dies_between_hand_overs_is_forgotten(transport: Transport) -> None:
    address = await transport.serve("127.0.0.1")
    async with running(PULLER, address) as puller, asyncio.timeout(60):
        channel = bytes.fromhex(await line(puller))
        outlet = transport.outlet(channel)
        await outlet.pack([1])
        await outlet.push([1])
        outlet.close()
        assert await line(puller) == "accepted"
        puller.kill()
        await puller.wait()
        other = tcp.create(ByteStore(4, layout=MIB), TransferConfig())
        await other.connect(address)  # until then this process has seen the end
        await other.close()
        with pytest.raises(HandoverFailed):
            transport.outlet(channel)

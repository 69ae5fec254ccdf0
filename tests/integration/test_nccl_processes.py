"""Transport nccl (gloo) between real processes, of which one is killed or frozen in the middle of a chunk.

What torch writes to standard error when its peer dies shows only where a test fails.
"""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from contracts.config import TransferConfig
from contracts.errors import HandoverFailed
from kv_transfer.transports.base import Transport
from kv_transfer.transports.nccl import create
from protos.links.base import LinkClosed
from tests.helpers.handover import LAYOUT, ByteStore
from tests.helpers.source_tree import ROOT

LARGE = replace(LAYOUT, head_dim=32_768)
"""Blocks of 4 MiB: what nobody takes does not fit into the buffers on the way."""
CHUNK = range(8)
_COMMON = """
import asyncio, sys
from kv_transfer.transports.nccl import create
from tests.integration.test_nccl_processes import CHUNK, LARGE, ByteStore, TransferConfig

transport = create(ByteStore(len(CHUNK), fill=7, layout=LARGE), TransferConfig())
"""
EXPORTER = f"""{_COMMON}
async def main():
    print(await transport.serve("127.0.0.1"), flush=True)
    outlet = transport.outlet(bytes.fromhex(await asyncio.to_thread(sys.stdin.readline)))
    print((await outlet.pack(CHUNK)).payload.hex(), flush=True)
    await outlet.push(CHUNK[:4])
    print("half", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
PULLER = f"""{_COMMON}
async def main():
    inlet = await (await transport.connect(sys.argv[1])).inlet()
    print(inlet.channel.hex(), flush=True)
    payload = bytes.fromhex(await asyncio.to_thread(sys.stdin.readline))
    print(sum(await inlet.accept(payload, CHUNK)), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def process(program: str, *args: str) -> AsyncIterator[Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *args, cwd=ROOT, stdin=PIPE, stdout=PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def says(child: Process) -> str:
    assert child.stdout is not None
    async with asyncio.timeout(30.0):
        return (await child.stdout.readline()).decode().strip()


async def tell(child: Process, line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(f"{line}\n".encode())
    await child.stdin.drain()


@pytest.fixture
def store() -> ByteStore:
    return ByteStore(len(CHUNK), fill=9, layout=LARGE)


@pytest.fixture
async def transport(store: ByteStore) -> AsyncIterator[Transport]:
    transport = create(store, TransferConfig(frame_bytes=2 * LARGE.block_bytes))
    yield transport
    await transport.close()


async def push_to(transport: Transport, child: Process) -> tuple[bytes, "asyncio.Task[None]", int]:
    """The channel that the process has opened, a chunk on its way to it, and the sum of that's checksums."""
    channel = bytes.fromhex(await says(child))
    outlet = transport.outlet(channel)
    packed = await outlet.pack(CHUNK)
    await tell(child, packed.payload.hex())
    return channel, asyncio.create_task(outlet.push(CHUNK)), sum(packed.checksums)


async def test_an_exporter_that_is_killed_in_the_middle_of_a_chunk(transport: Transport, store: ByteStore) -> None:
    for _ in range(2):  # the transport goes on with the next exporter
        async with process(EXPORTER) as exporter:
            connection = await transport.connect(await says(exporter))
            inlet = await connection.inlet()
            await tell(exporter, inlet.channel.hex())
            accepting = asyncio.create_task(inlet.accept(bytes.fromhex(await says(exporter)), CHUNK))
            assert await says(exporter) == "half"
            exporter.kill()
            async with asyncio.timeout(10.0):
                with pytest.raises(LinkClosed):
                    await accepting
            inlet.close(reuse=False)
            with pytest.raises(LinkClosed):
                await connection.inlet()
            await connection.close()
        assert store.data[7] == bytes([9]) * LARGE.block_bytes  # of this nothing had been sent


async def test_a_puller_that_is_killed_while_blocks_are_sent_to_it(transport: Transport) -> None:
    address = await transport.serve("127.0.0.1")
    async with process(PULLER, address) as puller:
        channel = bytes.fromhex(await says(puller))
        outlet = transport.outlet(channel)
        await outlet.pack(CHUNK)
        pushing = asyncio.create_task(outlet.push(CHUNK))
        await asyncio.sleep(0)  # it has begun, and waits for a puller that takes nothing
        puller.kill()
        async with asyncio.timeout(10.0):
            with pytest.raises(LinkClosed):
                await pushing
        outlet.close()
    with pytest.raises(HandoverFailed):
        transport.outlet(channel)
    async with process(PULLER, address) as puller:
        _, pushing, expected = await push_to(transport, puller)
        await pushing
        assert await says(puller) == str(expected)


async def test_a_puller_that_is_frozen_holds_nothing_once_the_exporter_gives_up(transport: Transport) -> None:
    address = await transport.serve("127.0.0.1")
    async with process(PULLER, address) as puller:
        channel = bytes.fromhex(await says(puller))
        puller.send_signal(signal.SIGSTOP)
        outlet = transport.outlet(channel)
        await outlet.pack(CHUNK)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await outlet.push(CHUNK)
        outlet.close()
        with pytest.raises(HandoverFailed):
            transport.outlet(channel)


async def test_an_exporter_that_is_frozen_is_given_up(transport: Transport) -> None:
    async with process(EXPORTER) as exporter:
        connection = await transport.connect(await says(exporter))
        inlet = await connection.inlet()
        exporter.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await inlet.accept(bytes(8) + len(CHUNK).to_bytes(4, "little"), CHUNK)
        inlet.close(reuse=True)
        with pytest.raises(LinkClosed):  # bounded in time
            await connection.inlet()
        await connection.close()

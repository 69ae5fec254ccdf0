"""The grpc link between real processes: kill -9 and SIGSTOP of either end."""

import asyncio
import contextlib
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import pytest

from contracts.errors import StartupError
from contracts.handover import Alive, Chunk, ExporterMessage, PullerMessage
from contracts.session import RouterMessage, WorkerMessage
from protos.links import grpc
from protos.links.base import Duplex, Link, LinkClosed

SERVER = """
import asyncio
from contracts.handover import Chunk, Progress
from protos.links import grpc

class Server:
    async def pull(self, stream):
        await stream.receive()
        await stream.send(Progress(1, 0))
        for number in range(1_000):
            await stream.send(Chunk(number, 1, (0,), bytes(1 << 20)))

async def main():
    print(await grpc.create().serve("127.0.0.1:0", Server()), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
CLIENT = """
import asyncio, sys
from contracts.handover import Alive
from protos.links import grpc

async def main():
    stream = await grpc.create().open_pull(sys.argv[1])
    await stream.send(Alive())
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Exporter:
    """Tells how each pull went."""

    def __init__(self, *, sends: bool) -> None:
        self.events: asyncio.Queue[str] = asyncio.Queue()
        self._sends = sends

    async def session(self, stream: Duplex[WorkerMessage, RouterMessage]) -> None:
        raise AssertionError("no session was expected")

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        try:
            assert await stream.receive() == Alive()
            self.events.put_nowait("started")
            while self._sends:
                await stream.send(Chunk(0, 1, (0,), bytes(1 << 20)))
            await stream.receive()
            self.events.put_nowait("orderly")
        except LinkClosed:
            self.events.put_nowait("broken")

    async def scrape(self) -> str:
        return ""


@contextlib.asynccontextmanager
async def running(program: str, *arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *arguments, stdout=PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    link = grpc.create()
    yield link
    await link.close()


async def address_of(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def read_all(stream: Duplex[PullerMessage, ExporterMessage]) -> None:
    while await stream.receive() is not None:
        pass


async def send_for_ever(stream: Duplex[PullerMessage, ExporterMessage]) -> None:
    while True:
        await stream.send(Alive())


async def test_killed_server_breaks_receive_and_send(link: Link) -> None:
    async with running(SERVER) as server:
        address = await address_of(server)
        stream = await link.open_pull(address)
        await stream.send(Alive())
        assert await stream.receive() is not None
        receiving = asyncio.create_task(read_all(stream))
        sending = asyncio.create_task(send_for_ever(stream))
        server.kill()
        async with asyncio.timeout(20):
            for task in (receiving, sending):
                with pytest.raises(LinkClosed):
                    await task
        await stream.close()
        with pytest.raises(LinkClosed):
            await link.open_pull(address)


@pytest.mark.parametrize("sends", [False, True])
async def test_killed_client_never_looks_like_an_orderly_end(link: Link, sends: bool) -> None:
    exporter = Exporter(sends=sends)
    address = await link.serve("127.0.0.1:0", exporter)
    for _ in range(8):
        async with running(CLIENT, address) as client, asyncio.timeout(20):
            assert await exporter.events.get() == "started"
            client.kill()
            assert await exporter.events.get() == "broken"


async def test_frozen_server_times_out_whatever_is_asked_of_it(link: Link) -> None:
    async with running(SERVER) as server:
        address = await address_of(server)
        stream = await link.open_pull(address)
        await stream.send(Alive())
        assert await stream.receive() is not None
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(LinkClosed, match="did not answer"):
            await link.scrape(address, 0.2)
        with pytest.raises(LinkClosed, match="accepted no stream"):
            await link.open_session(address)
        await stream.close()


async def test_a_listener_that_does_not_speak_is_given_up(link: Link) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        with pytest.raises(LinkClosed, match="nobody answers"):
            await link.open_session(f"{host}:{port}")


async def test_closing_the_link_ends_what_waits_on_it(link: Link) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        connecting = asyncio.create_task(link.open_session(f"{host}:{port}"))
        async with running(SERVER) as server:
            address = await address_of(server)
            stream = await link.open_pull(address)
            server.send_signal(signal.SIGSTOP)
            waiting = [
                connecting,
                asyncio.create_task(link.open_session(address)),
                asyncio.create_task(link.scrape(address, 600)),
                asyncio.create_task(stream.receive()),
            ]
            for _ in range(10):
                await asyncio.sleep(0)
            await link.close()
            for result in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(result, LinkClosed)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nowhere", "host:port"),
        ("127.0.0.1:65536", "host:port"),
        ("127.0.0.1:", "host:port"),
        ("[::1:0", "cannot listen"),
        ("192.0.2.1:0", "assign"),
    ],
)
async def test_addresses_that_cannot_be_bound(link: Link, address: str, why: str) -> None:
    with pytest.raises(StartupError, match=why):
        await link.serve(address, Exporter(sends=False))


async def test_ipv6(link: Link) -> None:
    address = await link.serve("[::1]:0", Exporter(sends=False))
    assert address.startswith("[::1]:")
    assert await link.scrape(address, 20) == ""

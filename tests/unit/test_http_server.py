"""The HTTP frontend on real sockets: clients that go away or do not read, ports, and the stop."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from contracts.errors import EngineFailed, StartupError
from contracts.requests import Output, Token
from router.frontends import RouterFrontends
from router.http.http_server import HttpServer
from tests.helpers.public_api import MODEL, FakeService, answer, events_of, frontends, output, tiny_text
from text.text_processor import TextProcessor


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return tiny_text(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def serving(service: FakeService, text: TextProcessor, **limits: Any) -> AsyncIterator[int]:
    """The HTTP port of running frontends."""
    made = frontends(service, text, **limits)
    ports = await made.start()
    try:
        yield ports.http
    finally:
        await made.stop(0)


async def send_completion(port: int, **changes: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": MODEL, "prompt": [7], "max_tokens": 200, **changes}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
async def test_client_that_goes_away(text: TextProcessor, stream: bool, steps: int) -> None:
    """Before and after tokens came; the gate never opens, so only the disconnect can end the request."""
    service = FakeService([*answer("a", "b", "c")[:steps], asyncio.Event()])
    async with serving(service, text) as port, asyncio.timeout(10):
        reader, writer = await send_completion(port, stream=stream)
        await service.started.wait()
        if stream and steps:
            await reader.readuntil(b"data: ")
        writer.close()
        await service.closed.wait()
        await writer.wait_closed()


async def test_client_that_half_closes_goes_away(text: TextProcessor) -> None:
    service = FakeService([asyncio.Event()])
    async with serving(service, text) as port, asyncio.timeout(10):
        _, writer = await send_completion(port)
        await service.started.wait()
        writer.write_eof()
        await service.closed.wait()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_asked_for_more_on_the_same_connection_goes_away(text: TextProcessor, stream: bool) -> None:
    """A second request behind the first, on one connection, hides nothing of the client's end."""
    service = FakeService([*answer("a")[:1], asyncio.Event()])
    async with serving(service, text) as port, asyncio.timeout(10):
        _, writer = await send_completion(port, stream=stream)
        await service.started.wait()
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await writer.drain()
        writer.transport.abort()
        await service.closed.wait()


async def test_client_that_does_not_read(text: TextProcessor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    class Endless(FakeService):
        async def generate(self, request: Any) -> Any:
            try:
                position = 0
                while True:
                    position += 1
                    yield Output("1-1", (Token(position, 7, "x" * 100_000),), 0)
                    await asyncio.sleep(0)  # as a real one does
            finally:
                self.closed.set()

    service = Endless()
    async with serving(service, text, slow_client_seconds=0.3) as port, asyncio.timeout(20):
        _, writer = await send_completion(port, stream=True)
        await service.closed.wait()
        writer.close()
    assert any("slow_client" in record.getMessage() for record in caplog.records)


async def test_header_comes_with_the_first_token(text: TextProcessor) -> None:
    gate = asyncio.Event()
    service = FakeService([gate, *answer("a")])
    async with serving(service, text) as port, asyncio.timeout(10):
        reader, writer = await send_completion(port, stream=True)
        await service.started.wait()
        first = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
        async with httpx.AsyncClient() as other:  # the loop has turned many times when this is answered
            assert (await other.get(f"http://127.0.0.1:{port}/health")).status_code == 200
        assert not first.done()
        gate.set()
        head = (await first).decode().lower()
        assert head.startswith("http/1.1 200")
        assert "content-type: text/event-stream; charset=utf-8" in head
        assert "\r\ndate: " in head
        writer.close()
        await writer.wait_closed()


async def test_silent_stream_shows_life_and_then_errors_are_events(text: TextProcessor) -> None:
    gate = asyncio.Event()
    service = FakeService([gate, EngineFailed("late")])
    async with serving(service, text, silent_header_seconds=0.01) as port, asyncio.timeout(10):
        reader, writer = await send_completion(port, stream=True)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readuntil(b": ping\n\n")
        gate.set()
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b'data: {"error":{"message":"late"' in rest
        assert b"data: [DONE]\n\n" in rest
        writer.close()
        await writer.wait_closed()


async def test_connection_is_used_again(text: TextProcessor) -> None:
    service = FakeService(answer("a"))
    async with serving(service, text) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        body = {"model": MODEL, "prompt": [7]}
        for stream in (True, False, True):
            response = await client.post("/v1/completions", json=body | {"stream": stream})
            assert response.status_code == 200
            if stream:
                assert events_of(response.content)[-1] == "[DONE]"


async def test_body_over_the_limit_is_answered(text: TextProcessor) -> None:
    async with (
        serving(FakeService(answer("a")), text) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        response = await client.post("/v1/completions", content=b" " * (9 << 20))
        assert response.status_code == 413
        assert (await client.get("/health")).status_code == 200


async def test_a_body_that_does_not_come_is_late(text: TextProcessor) -> None:
    async with serving(FakeService(answer("a")), text, request_seconds=0.05) as port, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"model":')
        assert (await reader.readuntil(b"\r\n")).split()[1] == b"504"
        writer.close()
        await writer.wait_closed()


async def test_port_in_use(text: TextProcessor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = frontends(FakeService(), text, http_port=port)
        with pytest.raises(StartupError, match=f"cannot listen for HTTP on 127.0.0.1:{port}: .*in use") as caught:
            await made.start()
        assert "\n" not in caught.value.message


async def test_grpc_port_in_use_frees_the_http_port(text: TextProcessor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        http_port = free.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = frontends(FakeService(), text, http_port=http_port, grpc_port=port)
        with pytest.raises(StartupError, match=f"cannot listen for gRPC on 127.0.0.1:{port}: .*in use"):
            await made.start()
    socket.create_server(("127.0.0.1", http_port)).close()


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_ends_what_still_runs(text: TextProcessor, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService([*answer("a", "b")[:1], asyncio.Event()])
    made: RouterFrontends = frontends(service, text)
    ports = await made.start()
    async with asyncio.timeout(15):
        reader, writer = await send_completion(ports.http, stream=stream)
        if stream:
            await reader.readuntil(b"data: ")
        await service.started.wait()
        await made.stop(0)
        assert service.closed.is_set()
        rest = await reader.read()
        assert b"stop" not in rest if stream else b"503" in rest
        writer.close()
        await made.stop(0)
    assert not [record for record in caplog.records if record.exc_info]
    with pytest.raises(OSError):  # noqa: PT011 - any refusal will do
        await asyncio.open_connection("127.0.0.1", ports.http)


async def test_running_requests_may_end_within_the_grace(text: TextProcessor) -> None:
    gate = asyncio.Event()
    service = FakeService([gate, output(1, "a"), *answer("b")])
    made = frontends(service, text)
    ports = await made.start()
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        reader, writer = await send_completion(ports.http)
        await service.started.wait()
        stopping = group.create_task(made.stop(10))
        gate.set()
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        await stopping


def test_small_writes_wait_for_no_acknowledgement() -> None:
    """Whatever loop serves: the connections inherit it from the listening socket."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise NotImplementedError

    server = HttpServer(app, "127.0.0.1", 0, 5.0)
    with server._bind() as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

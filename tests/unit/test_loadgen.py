"""The load generator against a tiny server of server-sent events that answers as a test tells it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from contracts.errors import ConfigError, StartupError
from loadgen.client import Sample
from loadgen.report import Percentiles, summarize
from loadgen.workload import BenchOptions, prompts, run_bench

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def event(payload: Any) -> bytes:
    return f"data: {payload if isinstance(payload, str) else json.dumps(payload)}\n\n".encode()


def text(content: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content}}]})


async def head(writer: asyncio.StreamWriter, status: str = "200 OK", kind: str = "text/event-stream") -> None:
    writer.write(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode())
    await writer.drain()


async def well(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """A role, as many tokens as were asked for, usage, the end."""
    await head(writer)
    writer.write(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
    for _ in range(body["max_tokens"]):
        writer.write(text("a"))
        await writer.drain()
    writer.write(b": ping\n\n" + event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
    usage = {"prompt_tokens": 11, "completion_tokens": body["max_tokens"]}
    writer.write(event({"choices": [], "usage": usage}) + event("[DONE]"))


class Server:
    """`answers` says how the requests are answered, in order of arrival; the last one for the rest."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [well]
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.running = 0
        self.most_running = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        header = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(header)
        if header.startswith("GET /v1/models "):
            await head(writer, kind="application/json")
            writer.write(json.dumps({"data": [{"id": "tiny"}]}).encode())
        else:
            assert header.startswith("POST /v1/chat/completions ")
            (length,) = (line for line in header.splitlines() if line.lower().startswith("content-length:"))
            self.bodies.append(json.loads(await reader.readexactly(int(length.split(":")[1]))))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            await (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])(self.bodies[-1], writer)
            self.running -= 1
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield made


async def test_closed_loop(server: Server) -> None:
    hold_until_together(server, 3)
    progress: list[tuple[int, int]] = []
    options = BenchOptions(server.url, requests=7, concurrency=3, input_tokens=5, output_tokens=4, api_key="secret")
    async with asyncio.timeout(20):
        report = await run_bench(options, lambda done, total: progress.append((done, total)))
    assert (report.requests, report.succeeded, report.errors) == (7, 7, {})
    assert (report.prompt_tokens, report.output_tokens) == (77, 28)
    assert report.ttft is not None
    assert report.tpot is not None
    assert report.inter_token is not None
    assert report.output_tokens_per_second == pytest.approx(28 / report.seconds)
    assert progress == [(n, 7) for n in range(1, 8)]
    assert server.most_running == 3
    assert sorted(body["messages"][0]["content"] for body in server.bodies) == sorted(prompts(options))
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("tiny", 4, True, True)
    assert all("Bearer secret" in header for header in server.headers)
    json.dumps(report.as_dict(), allow_nan=False)


def hold_until_together(server: Server, count: int) -> None:
    """Hold the first `count` requests back until all of them are here."""
    held: list[asyncio.Event] = []

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        mine = asyncio.Event()
        held.append(mine)
        if len(held) == count:
            server.answers = [well]
            for other in held:
                other.set()
        await mine.wait()
        await well(body, writer)

    server.answers = [answer]


async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await head(writer, "503 Service Unavailable", "application/json")
    writer.write(b'{"error": {}}')


async def fail_midway(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await head(writer)
    writer.write(text("a") + event({"error": {"code": "worker_lost", "message": "m"}}) + event("[DONE]"))


async def cut(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await head(writer)
    writer.write(text("a"))


async def babble(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await head(writer)
    writer.write(event("{"))


async def not_a_stream(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await head(writer)
    writer.write(event([1]))


async def hang_up(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Close without a word."""


async def test_errors_are_counted_by_kind_and_end_nothing(server: Server) -> None:
    server.answers = [refuse, fail_midway, cut, babble, not_a_stream, hang_up, refuse, well]
    options = BenchOptions(server.url, model="m", requests=9, concurrency=1, output_tokens=2)
    report = await run_bench(options, lambda done, total: None)
    assert report.errors == {
        "http 503": 2,
        "worker_lost": 1,
        "stream cut": 1,
        "malformed stream": 2,
        "RemoteProtocolError": 1,
    }
    assert (report.requests, report.succeeded, report.output_tokens) == (9, 2, 4)
    assert "failed: http 503" in report.table()


async def test_ignore_eos_is_not_sent_unasked_and_pieces_count_without_usage(server: Server) -> None:
    async def plain(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await head(writer)
        writer.write(text("a") + text("b") + text("c") + event("[DONE]"))

    server.answers = [plain]
    options = BenchOptions(server.url, model="m", requests=1, concurrency=5, ignore_eos=False)
    report = await run_bench(options, lambda done, total: None)
    assert report.output_tokens == 3
    assert "ignore_eos" not in server.bodies[0]


async def test_unreachable_server_is_one_clear_error() -> None:
    with pytest.raises(StartupError, match=r"127\.0\.0\.1:1"):
        await run_bench(BenchOptions("http://127.0.0.1:1"), lambda done, total: None)
    with pytest.raises(ConfigError, match="--url"):
        await run_bench(BenchOptions("http://a:b"), lambda done, total: None)
    with pytest.raises(StartupError, match="protocol"):
        await run_bench(BenchOptions("localhost"), lambda done, total: None)


def test_prompts_are_seeded_and_of_the_asked_length() -> None:
    options = BenchOptions("", requests=4, input_tokens=50)
    drawn = list(prompts(options))
    assert drawn == list(prompts(options))
    assert drawn != list(prompts(BenchOptions("", requests=4, input_tokens=50, seed=1)))
    assert [len(prompt.split()) for prompt in drawn] == [50] * 4
    assert len({prompt[:20] for prompt in drawn}) == 4


def test_report_arithmetic() -> None:
    samples = [Sample(ttft=n / 100, gaps=(0.1, 0.3), prompt_tokens=2, tokens=5, error="") for n in range(1, 101)]
    samples.append(Sample(ttft=99.0, gaps=(99.0,), prompt_tokens=2, tokens=2, error="http 500"))
    samples.append(Sample(ttft=None, gaps=(), prompt_tokens=0, tokens=0, error="http 500"))
    report = summarize(samples, seconds=10.0)
    assert report.ttft == Percentiles(0.5, 0.99)
    assert report.tpot is not None
    assert (report.tpot.p50, report.tpot.p99) == pytest.approx((0.1, 0.1))
    assert report.inter_token == Percentiles(0.1, 0.3)
    assert (report.output_tokens, report.output_tokens_per_second, report.requests_per_second) == (500, 50.0, 10.0)
    assert report.errors == {"http 500": 2}


def test_report_of_nothing() -> None:
    report = summarize([], seconds=0.0)
    assert report.ttft is report.tpot is report.inter_token is None
    assert "TTFT" in report.table()
    json.dumps(report.as_dict(), allow_nan=False)

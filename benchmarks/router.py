"""What the router adds to the time to first token when nothing else is going on.

    python -m benchmarks.router [--requests 300] [--prompt-words 24]

Three processes: a client, a router with its HTTP port, and an aggregated worker with a simulated runner
whose steps take 5 ms. In turn, the client asks the worker directly over a session, as a router does, and
through the router over HTTP, each for one token, so that no step of one request runs into the other. Both
times run from the request's first byte to its first token's arrival. Prints both medians and the median of
the differences, pair by pair.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from multiprocessing.connection import Connection

import uvloop

from cluster.nodes import build_host, build_router, vocabulary_of
from contracts.config import ClusterConfig, Config, KvConfig, RouterConfig
from contracts.kv import KvLayout
from contracts.requests import AttemptKey, SamplingParams
from contracts.seams import load_plug
from contracts.session import Hello, RouterMessage, Submit, Tokens, WorkerFrame, WorkerMessage
from contracts.workers import Role, WorkerInfo
from engine.runners.simulated import create
from protos.links.base import Duplex
from router.frontends import RouterFrontends
from router.sessions import ModelIdentity
from shared_state.registry import Registry
from telemetry.tracing import NoTracing
from text.model_resolver import resolve_model
from text.text_processor import TextProcessor

STEP_SECONDS = 0.005
BLOCKS = 4096
CONFIG = replace(
    Config(),
    cluster=ClusterConfig(mode="aggregated", secret="benchmark"),  # noqa: S106 - two processes of this benchmark
    kv=KvConfig(blocks=BLOCKS),
    router=RouterConfig(http_port=0, grpc_port=0),
)


class OneWorker:
    """A registry that knows one worker and never changes."""

    def __init__(self, worker: WorkerInfo) -> None:
        self._worker = worker

    async def watch(self) -> AsyncGenerator[list[WorkerInfo]]:
        """The worker, once."""
        yield [self._worker]
        await asyncio.Event().wait()


def load_text() -> TextProcessor:
    """SmolLM2's tokenizer and template."""
    return TextProcessor(resolve_model(CONFIG.model, lambda line: None))


def run_worker(pipe: Connection) -> None:
    """The worker's process: tells its address, ends when the pipe does."""

    async def serve() -> None:
        text = load_text()
        layout = KvLayout("sim", text.tokenizer.fingerprint, "sim", "uint64", 1, 1, 1, CONFIG.kv.block_size, "none")
        host = build_host(
            CONFIG,
            WorkerInfo("decode-0", Role.DECODE, "127.0.0.1:0", time.time_ns(), os.getpid()),
            runner=create(layout, BLOCKS, text.metadata.vocab_size, lambda plan: STEP_SECONDS),
            vocabulary=vocabulary_of(CONFIG, text),
            link=load_plug("link", "grpc").create(),
            registry=Registry(load_plug("registry", "memory").create(), "benchmark"),
            tracing=NoTracing(),
        )
        pipe.send(await host.start())
        await asyncio.to_thread(pipe.recv)
        await host.stop(0)

    uvloop.run(serve())  # as cluster/actors.py runs nodes


def run_router(pipe: Connection, worker: WorkerInfo) -> None:
    """The router's process: tells its HTTP port, ends when the pipe does."""

    async def serve() -> None:
        link = load_plug("link", "grpc").create()
        service = build_router(
            CONFIG,
            router_id="router-0",
            incarnation=time.time_ns(),
            link=link,
            registry=OneWorker(worker),
            identity=ModelIdentity(),
            tracing=NoTracing(),
        )
        frontends = RouterFrontends(CONFIG, service, load_text())
        ports = await frontends.start()
        service.start()
        await service.wait_ready()
        pipe.send(ports.http)
        await asyncio.to_thread(pipe.recv)
        await service.stop()
        await frontends.stop(0)
        await link.close()

    uvloop.run(serve())  # as cluster/actors.py runs nodes


async def ask_directly(
    session: Duplex[RouterMessage, WorkerMessage], incarnation: int, number: int, prompt: tuple[int, ...]
) -> float:
    """Seconds from Submit to the first token."""
    key = AttemptKey(f"direct-{number}", 1)
    sampling = SamplingParams(max_tokens=1, seed=number, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    await session.send(Submit(key, incarnation, b"t" * 16, prompt, (), sampling, str(number), 60_000, ""))
    while True:
        frame = await session.receive()
        assert isinstance(frame, WorkerFrame)
        if any(isinstance(event, Tokens) and event.key == key for event in frame.events):
            break
    return time.perf_counter() - began


async def ask_router(port: int, prompt: str) -> float:
    """Seconds from the request's first byte to the first chunk, on a kept-alive connection's terms."""
    body = json.dumps(
        {
            "model": CONFIG.model.name,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    await reader.readuntil(b"data: ")
    seconds = time.perf_counter() - began
    await reader.read()
    writer.close()
    await writer.wait_closed()
    return seconds


async def measure(worker: WorkerInfo, port: int, requests: int, words: int) -> None:
    """Ask in turn and print."""
    text = load_text()
    link = load_plug("link", "grpc").create()
    session = await link.open_session(worker.address)
    await session.send(Hello("client", 1, CONFIG.cluster.secret))
    await session.receive()
    direct: list[float] = []
    routed: list[float] = []
    for number in range(requests + 20):
        prompt = f"{number} " + "word " * words
        ids = tuple(text.template.completion_ids(prompt))
        direct.append(await ask_directly(session, worker.incarnation, number, ids))
        routed.append(await ask_router(port, prompt))
    await link.close()
    pairs = list(zip(direct, routed, strict=True))[20:]  # the first ones warm up
    added = [1000 * (through - straight) for straight, through in pairs]
    print_line(f"prompt of {words} words, {len(pairs)} pairs, step of {1000 * STEP_SECONDS:g} ms")
    print_line(f"TTFT straight from the worker  p50 {1000 * statistics.median(d for d, _ in pairs):6.2f} ms")
    print_line(f"TTFT through the router        p50 {1000 * statistics.median(r for _, r in pairs):6.2f} ms")
    deciles = statistics.quantiles(added, n=10)
    print_line(f"added by the router            p50 {statistics.median(added):6.2f} ms   p90 {deciles[-1]:6.2f} ms")


def print_line(line: str) -> None:
    """For people."""
    print(line, flush=True)  # noqa: T201 - a benchmark's output


def main() -> None:
    """Start the processes and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--prompt-words", type=int, default=24)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    worker_pipe, worker_end = spawn.Pipe()
    router_pipe, router_end = spawn.Pipe()
    worker_process = spawn.Process(target=run_worker, args=(worker_end,))
    worker_process.start()
    worker = worker_pipe.recv()
    router_process = spawn.Process(target=run_router, args=(router_end, worker))
    router_process.start()
    port = router_pipe.recv()
    try:
        asyncio.run(measure(worker, port, options.requests, options.prompt_words))
    finally:
        for pipe, process in ((router_pipe, router_process), (worker_pipe, worker_process)):
            pipe.send("stop")
            process.join(10)
            process.kill()


if __name__ == "__main__":
    main()

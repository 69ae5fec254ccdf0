"""How fast each transport hands a prompt's KV over between two processes, against what this machine can do.

    python -m benchmarks.handover [--transports shared_memory,tcp] [--repeat 15] [--grpc-ceiling] [--json FILE]

One process exports a prompt, this one pulls it again and again, with what workers use: pool, exports, exporter,
receiver, grpc link; only the engine is missing. A hand-over counts from `Receiver.receive` to its commit: every block
has arrived and its checksum was verified in the puller's own pool.

Each round measures the baselines between the same two processes, with as many bytes: a copy between two buffers by one
thread; one TCP connection, sendall to recv_into; one grpc.aio stream of raw bytes in frames of the same size. A share
is the median of the quotients within a round, so that a machine that is slow for a while is slow for both.
--grpc-ceiling compares ways to drive bare gRPC instead, beside plain TCP.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import uvloop

from benchmarks import bare_grpc
from benchmarks.bare_grpc import Measure, Way
from benchmarks.exporting import BLOCK_TOKENS, HOST, INCARNATION, LONG, ROW_BYTES, TICKET, Spec, exporting
from benchmarks.tables import Row, print_line, print_table
from cluster.freed_memory import keep_freed_memory
from contracts.config import TransferConfig
from contracts.errors import PdserveError
from contracts.handover import Last
from contracts.seams import load_plug, plugs
from contracts.session import Source
from engine.kv_pool import KvPool
from kv_transfer.orders import ReceiveOrder
from kv_transfer.peer import Peer, Puller
from kv_transfer.receiver import Receiver

WARM_UP = 3  # rounds
BASELINES = {"shared_memory": "memory copy", "tcp": "plain tcp", "grpc": "bare grpc", "nccl": "plain tcp"}
GOALS = {"shared_memory": 0.4, "tcp": 0.7, "grpc": 0.9}


def memory_copy(spec: Spec) -> Measure:
    """One thread, from one buffer to another."""
    source = np.random.default_rng(2).integers(0, 256, spec.total, np.uint8)
    target = np.zeros_like(source)

    async def measure() -> float:
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    return measure


def plain_tcp(spec: Spec, connection: socket.socket) -> Measure:
    """Blocking calls and nothing else: this thread has nothing to do meanwhile."""
    target = memoryview(bytearray(spec.total))

    async def measure() -> float:
        began, received = time.perf_counter(), 0
        connection.sendall(b"g")
        while received < spec.total:
            received += connection.recv_into(target[received:], 0, socket.MSG_WAITALL)
        return time.perf_counter() - began

    return measure


async def hand_over(spec: Spec, stack: AsyncExitStack, source: Source, name: str) -> tuple[Measure, list[float]]:
    """One transport over a verified link, and the seconds to the first frame of each measurement."""
    pool = KvPool(spec.layout, spec.blocks)
    stack.callback(pool.close)
    link = load_plug("link", "grpc").create()
    stack.push_async_callback(link.close)
    transport = load_plug("transport", name).create(pool, spec.config)
    stack.push_async_callback(transport.close)
    puller = Puller(
        link=link,
        store=pool,
        transports={name: transport},
        config=spec.config,
        worker_id="puller",
        secret="",
        measured=lambda transport, rate: None,
    )
    peer = Peer(source, puller)
    stack.push_async_callback(peer.close)
    await peer.verify()
    receiver = Receiver(puller, lambda source: peer.inlet())
    first_frames: list[float] = []

    async def measure() -> float:
        committed: list[float] = []

        def commit(last: Last) -> None:
            committed.append(time.perf_counter())

        order = ReceiveOrder(
            key=spec.key(name, len(first_frames)),
            ticket=TICKET,
            source=source,
            blocks=range(spec.blocks),
            first_block=0,
            kv_tokens=spec.blocks * BLOCK_TOKENS,
            traceparent="",
            deadline=asyncio.get_running_loop().time() + LONG,
        )
        began = time.perf_counter()
        stats = await receiver.receive(order, commit)
        assert stats.first_byte is not None
        first_frames.append(stats.first_byte)
        return committed[0] - began

    return measure, first_frames


async def in_rounds(measures: Mapping[str, Measure], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turn, after the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(WARM_UP + rounds):
        for name, measure in measures.items():
            took = await measure()
            if number >= WARM_UP:
                seconds[name].append(took)
    return seconds


async def compare_transports(spec: Spec) -> list[Row]:
    """A row for each baseline and transport."""
    async with exporting(spec) as addresses, AsyncExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((HOST, addresses.plain)))
        bare = bare_grpc.open_way(Way(spec.total, spec.frame), addresses.bare)
        measures = {
            "memory copy": memory_copy(spec),
            "plain tcp": plain_tcp(spec, connection),
            "bare grpc": await stack.enter_async_context(bare),
        }
        source, first_frames = Source("exporter", addresses.link, INCARNATION), {}
        for name in spec.transports:
            measures[name], first_frames[name] = await hand_over(spec, stack, source, name)
        seconds = await in_rounds(measures, spec.handovers - WARM_UP)
    rows: list[Row] = []
    for name, took in seconds.items():
        row: Row = {"what": name, "GB/s": spec.total / statistics.median(took) / 1e9}
        row["ms"] = 1000 * statistics.median(took)
        if name in first_frames:
            row["first frame ms"] = 1000 * statistics.median(first_frames[name][WARM_UP:])
            row |= {"of": BASELINES[name], "share": share(seconds, BASELINES[name], name), "goal": GOALS.get(name, "")}
        rows.append(row)
    return rows


def ways(spec: Spec) -> dict[str, Way]:
    """To drive bare gRPC."""
    total, frame = spec.total, spec.frame
    return {
        "grpc.aio, one stream": Way(total, frame),
        "frames joined from two pieces": Way(total, frame, joined=True),
        **{f"frames of {size} KiB": Way(total, size * 1024) for size in (64, 256, 4096, 16384)},
        "4 streams, one channel": Way(total, frame, streams=4),
        "2 channels": Way(total, frame, channels=2, streams=2),
        "4 channels": Way(total, frame, channels=4, streams=4),
        "threads, one stream": Way(total, frame, threads=True),
        "threads, 2 channels": Way(total, frame, channels=2, streams=2, threads=True),
        "threads, 4 channels": Way(total, frame, channels=4, streams=4, threads=True),
    }


def compare_ways(spec: Spec) -> Iterator[Row]:
    """A row for each way, each in two processes of its own, as what other ways leave in malloc's lists would help or
    hurt it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as fresh:
        for name, way in ways(spec).items():
            row: Row = {"what": name}
            for kept in (False, True):
                rate, of_plain = fresh.submit(measure_way, replace(spec, keep_freed=kept), way).result()
                memory = "freed memory kept" if kept else "by default"
                row |= {f"GB/s {memory}": rate, f"of plain tcp {memory}": of_plain}
            yield row


def measure_way(spec: Spec, way: Way) -> tuple[float, float]:
    """GB/s, and the share of plain TCP's."""

    async def measure() -> tuple[float, float]:
        async with exporting(spec) as addresses, AsyncExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((HOST, addresses.plain)))
            opened = await stack.enter_async_context(bare_grpc.open_way(way, addresses.bare))
            measures = {"plain tcp": plain_tcp(spec, connection), "way": opened}
            seconds = await in_rounds(measures, spec.handovers - WARM_UP)
        return spec.total / statistics.median(seconds["way"]) / 1e9, share(seconds, "plain tcp", "way")

    if spec.keep_freed:
        keep_freed_memory()
    return uvloop.run(measure())


def share(seconds: Mapping[str, Sequence[float]], baseline: str, name: str) -> float:
    """Of the baseline's rate, see the module."""
    return statistics.median(base / mine for base, mine in zip(seconds[baseline], seconds[name], strict=True))


def main() -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    known = [name for name in plugs("transport") if name != "memory"]
    parser.add_argument("--transports", default=",".join(known), help="names with commas between them")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block-bytes", type=int, default=737_280, help=f"a multiple of {ROW_BYTES}")
    parser.add_argument("--frame-bytes", type=int, default=TransferConfig().frame_bytes)
    parser.add_argument("--repeat", type=int, default=15, help="rounds that count")
    parser.add_argument(
        "--keep-freed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="processes keep the memory that they free, as workers do",
    )
    parser.add_argument("--grpc-ceiling", action="store_true", help="compare ways to drive bare gRPC instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.block_bytes % ROW_BYTES:
        parser.error(f"--block-bytes must be a multiple of {ROW_BYTES}")
    names = () if options.grpc_ceiling else tuple(options.transports.split(","))
    rounds = WARM_UP + options.repeat
    spec = Spec(options.blocks, options.block_bytes, options.frame_bytes, names, rounds, options.keep_freed)
    print_line(f"{spec.total / 1e6:.1f} MB in frames of {spec.frame} bytes, medians of {options.repeat} rounds")
    try:
        if options.grpc_ceiling:
            rows = list(compare_ways(spec))
        else:
            if spec.keep_freed:
                keep_freed_memory()
            rows = uvloop.run(compare_transports(spec))
    except PdserveError as error:
        sys.exit(f"benchmarks.handover: {error.message}")
    print_table(rows)
    if options.json is not None:
        options.json.write_text(json.dumps({"spec": asdict(spec), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

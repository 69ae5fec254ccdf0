"""Real processes that are killed, stopped and restarted: nothing of an old life counts, and nothing stays held."""

import asyncio
import pickle
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import Stale
from contracts.handover import Introduce, Pull, PullFailed
from contracts.requests import AttemptKey, SamplingParams
from contracts.session import Failed, Hello, Submit, WorkerEvent, WorkerFrame
from tests.helpers.process_cluster import ProcessCluster, process_cluster, process_config
from tests.helpers.simulated_cluster import request
from tests.helpers.simulated_engine import simulated_layout
from tests.integration.test_processes import undisturbed

PROMPT = tuple(random.Random(3).choices(range(1000), k=41))
LONG = tuple(random.Random(4).choices(range(1000), k=400))
LEASE = 1.0


def incarnation_of(cluster: ProcessCluster, worker_id: str) -> int:
    (view,) = [view for view in cluster.router.workers() if view.worker.id == worker_id]
    return view.worker.incarnation


async def test_a_worker_that_is_back_on_its_port_serves_the_first_request(tmp_path: Path) -> None:
    """And knows nothing of what was meant for its old life."""
    wanted = request(PROMPT, max_tokens=20)
    (expected,) = await undisturbed([wanted])
    async with process_cluster(process_config(), tmp_path) as cluster:
        assert await cluster.collect(wanted) == expected
        for worker_id in ("prefill-0", "decode-0"):
            worker = cluster.workers[worker_id]
            old, address = incarnation_of(cluster, worker_id), worker.address
            await worker.kill()
            worker.order = replace(worker.order, port=int(address.rpartition(":")[2]))
            await worker.start()
            assert worker.address == address
            await cluster.knows(worker_id, other_than=old)
            assert await cluster.collect(wanted) == expected

            stream = await cluster.link.open_pull(address)
            layout = simulated_layout(cluster.config.kv.block_size)
            await stream.send(Pull(AttemptKey("1-1", 1), b"t" * 16, old, "decode-0", "secret", layout, "grpc", 0))
            answer = await stream.receive()
            assert isinstance(answer, PullFailed)
            assert isinstance(answer.error.to_error(), Stale)
            await stream.close()

            stream = await cluster.link.open_pull(address)
            await stream.send(Introduce("decode-0", "secret", old, layout))
            answer = await stream.receive()
            assert isinstance(answer, PullFailed)
            assert isinstance(answer.error.to_error(), Stale)
            await stream.close()

            session = await cluster.link.open_session(address)
            await session.send(Hello("router-9", 1, "secret"))
            sampling = SamplingParams(max_tokens=4, seed=1)
            await session.send(Submit(AttemptKey("9-1", 1), old, b"t" * 16, PROMPT, (), sampling, "", 60_000, ""))
            events: list[WorkerEvent] = []
            while not events:
                message = await session.receive()
                events = list(message.events) if isinstance(message, WorkerFrame) else []
            assert isinstance(events[0], Failed)
            assert isinstance(events[0].error.to_error(), Stale)
            await session.close()
        await cluster.idle()


async def test_a_decode_worker_that_stands_still_pins_nothing_beyond_its_lease(tmp_path: Path) -> None:
    config = process_config(blocks=1000, lease_seconds=LEASE, silence_seconds=1.0)
    async with process_cluster(config, tmp_path, step_seconds=0.05) as cluster:
        running = asyncio.create_task(cluster.collect(request(LONG, max_tokens=100)))
        await cluster.until("prefill-0", lambda figures: figures["pdserve_leases"] > 0)
        cluster.workers["decode-0"].signal(signal.SIGSTOP)
        await cluster.until("prefill-0", lambda figures: not figures["pdserve_leases"], seconds=LEASE + 1)
        cluster.workers["decode-0"].signal(signal.SIGCONT)
        running.cancel()
        await asyncio.wait({running})
        await cluster.idle()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_router_that_dies_or_stands_still_leaves_nothing_on_the_workers(
    end: signal.Signals, tmp_path: Path
) -> None:
    async with process_cluster(process_config(blocks=1000), tmp_path, step_seconds=0.02) as cluster:
        wanted = [request(PROMPT[n:], max_tokens=400) for n in range(6)]
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.helpers.router_process"), stdin=PIPE, stdout=PIPE
        )
        await begin(router, pickle.dumps((cluster.config, wanted)))
        assert (await cluster.figures("decode-0"))["pdserve_requests_running"] > 3  # the last KV may be on its way
        router.send_signal(end)
        # a stopped process holds its connections open: it is found out by what it does not answer
        await cluster.idle(seconds=15.0)
        if end is signal.SIGSTOP:
            router.kill()
        await router.wait()
        (expected,) = await undisturbed([request(PROMPT, max_tokens=20)])
        assert await cluster.collect(request(PROMPT, max_tokens=20)) == expected


async def begin(router: Process, order: bytes) -> None:
    assert router.stdin is not None
    assert router.stdout is not None
    router.stdin.write(order)
    router.stdin.close()
    assert await router.stdout.readline() == b"all have begun\n"

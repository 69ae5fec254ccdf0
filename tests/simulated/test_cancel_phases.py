"""A cancel stops the work in whatever phase it comes: two steps on decode, one chunk on prefill; nothing is held."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from cluster.local import LocalCluster
from contracts.requests import AttemptKey
from decode_workers.worker import DecodeRole
from engine.block_manager import HolderKind
from prefill_workers.worker import PrefillRole
from simulator.virtual_time import run
from tests.helpers.simulated_cluster import collect, request, simulated_cluster, simulated_config

TICK = 0.0005
"""Far below a step."""
LONG = tuple(random.Random(8).choices(range(1000), k=300))
OTHER = tuple(random.Random(9).choices(range(1000), k=16))


class Phases:
    """A cluster that decodes something else all the time, and one long request of ours."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        prefill, decode = (cluster.workers[name]._role for name in ("prefill-0", "decode-0"))
        assert isinstance(prefill, PrefillRole)
        assert isinstance(decode, DecodeRole)
        self.prefill, self.decode = prefill, decode

    def holds(self, worker_id: str, kind: HolderKind) -> bool:
        holders = self.cluster.workers[worker_id].core.blocks.holders()
        return any(holder.kind is kind and self._is_ours(holder.key) for holder in holders)

    def held_anywhere(self) -> bool:
        return any(self.holds(worker_id, kind) for worker_id in self.cluster.workers for kind in HolderKind)

    def reached(self, phase: str) -> bool:
        match phase:
            case "queued in the router":
                return len(self.cluster.router._queue) == 1
            case "queued on the prefill worker":
                return len(self.prefill._legs) > 1 and not self.holds("prefill-0", HolderKind.EXPORT)
            case "computed in chunks":
                return self.holds("prefill-0", HolderKind.SEQUENCE) and self.holds("decode-0", HolderKind.RESERVATION)
            case "arriving":
                return self.holds("decode-0", HolderKind.RESERVATION) and not self.prefill.engine.busy
            case _:
                return self.holds("decode-0", HolderKind.SEQUENCE)

    @staticmethod
    def _is_ours(key: AttemptKey) -> bool:
        return key.request_id.endswith("-3")


def histogram(cluster: LocalCluster, worker_id: str) -> dict[str, float]:
    text = cluster.workers[worker_id].core.figures.exposition()
    name = "pdserve_cancel_to_stop_steps"
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(name))
    return {series.removeprefix(name): float(value) for series, value in pairs}


@pytest.mark.parametrize(
    ("phase", "prefill", "decode"),
    [
        ("queued in the router", 0, 0),
        ("queued on the prefill worker", 1, 1),
        ("computed in chunks", 1, 1),
        ("arriving", 1, 1),
        ("decoding", 0, 1),
    ],
)
def test_a_cancel_in(phase: str, prefill: int, decode: int) -> None:
    async def main() -> None:
        async with simulated_cluster(simulated_config(blocks=400)) as cluster:
            phases = Phases(cluster)
            if phase == "arriving":
                hold_chunks(phases)
            first = asyncio.create_task(collect(cluster, request(OTHER, max_tokens=300)))
            await asyncio.sleep(0.05)
            length = 60 if phase == "queued on the prefill worker" else 300  # it takes 64 tokens at a time
            ahead = asyncio.create_task(collect(cluster, request(LONG[-length:], max_tokens=1)))
            if not phase.startswith("queued"):
                await ahead
            ours = asyncio.create_task(collect(cluster, request(LONG, max_tokens=100)))
            await until(lambda: phases.reached(phase))
            engines = (phases.prefill.engine, phases.decode.engine)
            ours.cancel()
            await asyncio.sleep(0)
            steps = [engine.steps for engine in engines]
            await until(lambda: not phases.held_anywhere())
            taken = [engine.steps - before for engine, before in zip(engines, steps, strict=True)]
            assert taken[0] <= 1
            assert taken[1] <= 2
            for worker_id, count, most in (("prefill-0", prefill, "1.0"), ("decode-0", decode, "2.0")):
                found = histogram(cluster, worker_id)
                assert found["_count"] == found[f'_bucket{{le="{most}"}}'] == count, worker_id
            first.cancel()
            ahead.cancel()
            await asyncio.wait({first, ahead, ours})

    run(main())


async def until(true: Callable[[], bool]) -> None:
    """Looks far more often than steps end."""
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - in virtual time, and no event says what we look for
            await asyncio.sleep(TICK)


def hold_chunks(phases: Phases) -> None:
    """Blocks of ours are announced and do not arrive."""
    transport: Any = phases.decode._hand_over._transports["memory"]
    accept = transport._ends.accept

    async def held(payload: bytes | memoryview, blocks: Any) -> Any:
        if len(phases.decode._receiving) and any(Phases._is_ours(key) for key in phases.decode._receiving):
            await asyncio.Event().wait()
        return await accept(payload, blocks)

    transport._ends.accept = held

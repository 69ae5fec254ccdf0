"""A fetch of a prefix costs at most what it could save, and its faults stay inside it."""

import asyncio
import random

import pytest

from cluster.local import LocalCluster
from contracts.handover import Fetch
from contracts.kv import BlockHasher
from contracts.requests import AttemptKey, Token
from prefill_workers.worker import PrefillRole
from protos.links import memory
from simulator.virtual_time import run
from tests.helpers.simulated_cluster import collect, request, simulated_cluster, simulated_config
from tests.simulated.test_prefix_reuse import OTHER, PROMPT, WANTED, decoding, figure, kill, undisturbed


async def retried(cluster: LocalCluster, *, freeze: bool) -> list[Token]:
    """WANTED loses its decode worker and its prefill worker is busy, so that prefill-1 takes it up."""
    answer = asyncio.create_task(collect(cluster, WANTED))
    lost = await decoding(cluster)
    busy = asyncio.create_task(collect(cluster, request(OTHER, max_tokens=1)))
    await asyncio.sleep(0.008)
    address = cluster.workers["prefill-0"].core.info.address
    if freeze:
        cluster.network.freeze(address)
    await kill(cluster, lost)
    tokens = await answer
    cluster.network.thaw(address)
    await busy
    return tokens


def prefill_role(cluster: LocalCluster, worker_id: str) -> PrefillRole:
    role = cluster.workers[worker_id]._role
    assert isinstance(role, PrefillRole)
    return role


def test_a_holder_that_is_silent_is_not_waited_for_longer_than_it_takes_to_compute() -> None:
    async def main() -> None:
        expected = await undisturbed()
        async with simulated_cluster(simulated_config(prefill=2, decode=2)) as cluster:
            warm = [request(tuple(random.Random(n).choices(range(1000), k=200)), max_tokens=1) for n in (1, 2)]
            await asyncio.gather(*(collect(cluster, one) for one in warm))
            computed = figure(cluster, "prefill-1", "pdserve_prefill_tokens_total")
            assert computed == 200  # it knows its own pace
            began = asyncio.get_running_loop().time()
            assert await retried(cluster, freeze=True) == expected
            assert figure(cluster, "prefill-1", "pdserve_transfer_failures_total") == 1
            assert figure(cluster, "prefill-1", "pdserve_prefill_tokens_total") > computed + len(PROMPT)
            assert asyncio.get_running_loop().time() - began < 0.5
            peers = prefill_role(cluster, "prefill-1")._hand_over.peers
            assert peers._entries  # the holder is no worker that it follows
            await asyncio.sleep(cluster.config.transfer.lease_seconds + 1)
            assert not peers._entries

    run(main())


def test_a_fault_of_ours_in_a_fetch_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        expected = await undisturbed()
        async with simulated_cluster(simulated_config(prefill=2, decode=2)) as cluster:

            async def fail(*_: object) -> None:
                raise RuntimeError("a fault of ours")

            monkeypatch.setattr(prefill_role(cluster, "prefill-1")._hand_over.receiver, "receive", fail)
            assert await retried(cluster, freeze=False) == expected
            assert figure(cluster, "prefill-1", "pdserve_transfer_failures_total") == 1

    run(main())
    assert "a fault of ours" in caplog.text


def test_a_prefix_that_is_computed_while_it_is_fetched_is_kept_once() -> None:
    """Another request with the same prompt comes to the worker that fetches; the books stay right."""

    async def main() -> None:
        expected = await undisturbed()
        async with simulated_cluster(simulated_config(prefill=2, decode=2, step_tokens=64)) as cluster:
            answer = asyncio.create_task(collect(cluster, WANTED))
            lost = await decoding(cluster)
            busy = asyncio.create_task(collect(cluster, request(OTHER, max_tokens=1)))
            await asyncio.sleep(0.008)
            address = cluster.workers["prefill-0"].core.info.address
            cluster.network.freeze(address)
            await kill(cluster, lost)
            await asyncio.sleep(0.01)
            core = cluster.workers["prefill-1"].core
            fetching = core.blocks.counts().reserved
            assert fetching >= 25
            twin = asyncio.create_task(collect(cluster, request(PROMPT, max_tokens=60)))
            await asyncio.sleep(0.1)
            core.check_blocks()
            assert core.blocks.counts().reserved == fetching
            assert figure(cluster, "prefill-1", "pdserve_prefill_tokens_total") == len(PROMPT)
            cluster.network.thaw(address)
            assert await answer == await twin == expected
            await busy
            assert figure(cluster, "prefill-1", "pdserve_kv_transfer_blocks_total") == 25
            core.check_blocks()

    run(main())


def test_blocks_that_are_lent_to_a_puller_that_stands_still_come_back() -> None:
    """All of a prompt's cached blocks are lent, so that the next prompt finds no room until the lease ends."""

    async def main() -> None:
        config = simulated_config(blocks=32)
        async with simulated_cluster(config) as cluster:
            await collect(cluster, request(PROMPT, max_tokens=2))
            core = cluster.workers["prefill-0"].core
            hasher = BlockHasher(config.cluster.hash_key.encode(), config.kv.block_size, core.capacity.layout.model)
            parent, hashes = hasher.root(""), []
            for start in range(0, 100, config.kv.block_size):
                parent = hasher.extend(parent, PROMPT[start : start + config.kv.block_size])
                hashes.append(parent)
            stream = await memory.create(cluster.network).open_pull(core.info.address)
            await stream.send(
                Fetch(
                    key=AttemptKey("1-1/prefix", 1),
                    hashes=tuple(hashes),
                    deadline_ms=3_600_000,
                    incarnation=core.info.incarnation,
                    puller="decode-7",
                    secret=config.cluster.secret,
                    layout=core.capacity.layout,
                    transport="memory",
                )
            )
            await asyncio.sleep(0.1)
            core.check_blocks()
            assert core.blocks.counts().pinned == 25
            began = asyncio.get_running_loop().time()
            await collect(cluster, request(OTHER[:100], max_tokens=2))
            waited = asyncio.get_running_loop().time() - began
            assert waited == pytest.approx(config.transfer.lease_seconds, abs=0.5)

    run(main())

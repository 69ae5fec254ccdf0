"""The links check of `pdserve doctor`: what it measures, that it ends whatever the second process does, and leaves
nothing."""

import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cluster import link_check
from cluster.link_check import measure_links
from contracts.config import Config
from contracts.errors import StartupError
from kv_transfer.peer import Peer

CONFIG = Config()


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """No process, no pool, no thread of ours."""
    before = held()
    yield
    assert not multiprocessing.active_children()
    assert held() == before


def held() -> list[str]:
    pools = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:pdserve-kv" in line]
    return pools + [thread.name for thread in threading.enumerate() if thread.name.startswith("pdserve")]


def says_nothing(_: Config, pipe: Connection) -> None:
    """Nor does it end by itself."""
    time.sleep(600.0)
    pipe.close()


def dies(_: Config, pipe: Connection) -> None:
    pipe.close()
    os._exit(3)


async def test_every_transport_is_measured() -> None:
    found = await measure_links(CONFIG)
    assert list(found) == ["shared_memory", "tcp", "grpc"]
    assert all(isinstance(rate, float) and rate > 0 for rate in found.values()), found


async def test_a_second_process_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_check, "_serve", dies)
    with pytest.raises(StartupError, match="died"):
        await measure_links(CONFIG)


async def test_one_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_check, "_serve", says_nothing)
    monkeypatch.setattr(link_check, "_MOST_SECONDS", 0.1)
    monkeypatch.setattr(link_check, "_END_SECONDS", 0.1)
    with pytest.raises(StartupError, match="did not start in 0.1 s"):
        await measure_links(CONFIG)


async def test_a_host_that_is_not_ours_is_named() -> None:
    config = replace(CONFIG, cluster=replace(CONFIG.cluster, host="192.0.2.1"))
    with pytest.raises(StartupError, match=r"192\.0\.2\.1"):
        await measure_links(config)


async def test_what_was_not_measured_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process serves; the time is over while the first link is verified."""

    async def late(_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(Peer, "verify", late)
    assert set((await measure_links(CONFIG)).values()) == {"it took longer than 12 s"}

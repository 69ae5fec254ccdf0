"""Every plug of the registry seam behaves alike, and so does the registry over each."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from contracts.seams import load_plug, plugs
from contracts.workers import Role, WorkerInfo, WorkerLoad, WorkerState
from shared_state.backends.base import Backend
from shared_state.registry import Registry
from tests.helpers.valkey import ValkeyServer

SOON = 10.0  # seconds in which anything must have happened


@pytest.fixture(params=plugs("registry"))
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    plug = load_plug("registry", request.param)
    if request.param != "redis":
        yield plug.create()
        return
    with ValkeyServer(tmp_path) as server:
        made: Backend = plug.create(server.url, recheck=0.1)
        yield made
        await made.close()


def info(name: str, incarnation: int = 1, state: WorkerState = WorkerState.READY) -> WorkerInfo:
    return WorkerInfo(name, Role.DECODE, "127.0.0.1:7", incarnation, 42, state)


async def until(backend: Backend, directory: str, fits: Callable[[dict[str, bytes]], object]) -> None:
    """Follow the directory until its values fit."""
    async with asyncio.timeout(SOON), aclosing(backend.watch(directory)) as changes:
        async for _ in changes:
            if fits(await backend.list(directory)):
                return


@asynccontextmanager
async def announced(registry: Registry, worker: WorkerInfo) -> AsyncIterator[None]:
    """Announce while the block runs; leave by withdrawal."""
    task = asyncio.create_task(registry.announce(lambda: worker))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


async def test_values_come_back_by_directory(backend: Backend) -> None:
    assert await backend.list("a:") == {}
    await backend.put("a:x", b"\x00\xff", 30)
    await backend.put("a:y", b"1", 30)
    await backend.put("a:y", b"2", 30)
    await backend.put("b:x", b"3", 30)
    assert await backend.list("a:") == {"a:x": b"\x00\xff", "a:y": b"2"}
    assert await backend.list("b:") == {"b:x": b"3"}
    await backend.delete("a:x", b"\x00\xff")
    assert await backend.list("a:") == {"a:y": b"2"}


async def test_delete_spares_what_another_wrote(backend: Backend) -> None:
    await backend.put("a:x", b"newer", 30)
    await backend.delete("a:x", b"older")
    await backend.delete("a:absent", b"older")
    assert await backend.list("a:") == {"a:x": b"newer"}


async def test_lapsed_lease_is_noticed_and_a_renewed_one_stays(backend: Backend) -> None:
    await backend.put("a:renewed", b"1", 0.2)
    await backend.put("a:renewed", b"1", 30)
    await backend.put("a:lapses", b"1", 0.2)
    await until(backend, "a:", lambda found: "a:lapses" not in found)
    assert await backend.list("a:") == {"a:renewed": b"1"}


async def test_watch_starts_at_once_and_follows_changes(backend: Backend) -> None:
    async with asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
        tasks.create_task(until(backend, "a:", lambda found: found == {}))
        for value in (b"1", b"2"):
            seen = tasks.create_task(until(backend, "a:", {"a:x": value}.__eq__))
            await backend.put("a:x", value, 30)
            await seen
        gone = tasks.create_task(until(backend, "a:", lambda found: found == {}))
        await backend.delete("a:x", b"2")
        await gone


async def test_two_watchers_both_see(backend: Backend) -> None:
    async with asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(until(backend, "a:", lambda found: "a:x" in found))
        await backend.put("a:x", b"1", 30)


async def test_registry_follows_a_worker_from_announcement_to_withdrawal(backend: Backend) -> None:
    registry = Registry(backend, "test")
    async with asyncio.timeout(SOON), aclosing(registry.watch()) as lists:
        assert await anext(lists) == []
        async with announced(registry, info("decode-1")):
            assert await anext(lists) == [info("decode-1")]
            async with announced(registry, info("decode-0")):
                assert await anext(lists) == [info("decode-0"), info("decode-1")]
                assert await registry.workers() == [info("decode-0"), info("decode-1")]
                assert await Registry(backend, "another").workers() == []
            assert await anext(lists) == [info("decode-1")]
        assert await anext(lists) == []


async def test_registry_tells_a_change_of_state(backend: Backend) -> None:
    registry = Registry(backend, "test", ttl=0.3)
    state = WorkerState.READY
    async with asyncio.timeout(SOON), aclosing(registry.watch()) as lists:
        assert await anext(lists) == []
        task = asyncio.create_task(registry.announce(lambda: info("decode-0", state=state)))
        assert (await anext(lists))[0].state is WorkerState.READY
        state = WorkerState.DRAINING
        assert (await anext(lists))[0].state is WorkerState.DRAINING
        task.cancel()
        await asyncio.wait({task})


async def test_withdrawal_spares_a_newer_incarnation(backend: Backend) -> None:
    registry = Registry(backend, "test", ttl=30)
    async with asyncio.timeout(SOON), aclosing(registry.watch()) as lists:
        assert await anext(lists) == []
        async with announced(registry, info("decode-0", incarnation=1)):
            assert await anext(lists) == [info("decode-0", incarnation=1)]
            newer = asyncio.create_task(registry.announce(lambda: info("decode-0", incarnation=2)))
            assert await anext(lists) == [info("decode-0", incarnation=2)]
        assert await registry.workers() == [info("decode-0", incarnation=2)]
        newer.cancel()
        await asyncio.wait({newer})
        assert await anext(lists) == []


async def test_loads_ride_along(backend: Backend) -> None:
    registry = Registry(backend, "test")
    load = WorkerLoad(free_blocks=1, free_slots=2, backlog_tokens=3, running=4, waiting=5, stuck=True)
    task = asyncio.create_task(registry.announce(lambda: info("decode-0"), lambda: load))
    await until(backend, "pdserve:test:load:", bool)
    assert await registry.loads() == {"decode-0": load}
    task.cancel()
    await asyncio.wait({task})
    assert await registry.loads() == {}


async def test_unreadable_records_are_ignored_and_counted(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(backend, "test")
    good = '{"id": "ok", "role": "decode", "address": "a:1", "incarnation": 3, "pid": 4, "state": "ready"%s}'
    records = {
        "ok": good % ', "new": [1]',
        "text": "not JSON",
        "bytes": "",
        "list": "[]",
        "role": good.replace("decode", "unknown") % "",
        "type": good.replace("3", '"3"') % "",
        "missing": good.replace('"pid": 4, ', "") % "",
    }
    for name, record in records.items():
        await backend.put(f"pdserve:test:workers:{name}", record.encode(), 30)
    await backend.put("pdserve:test:workers:binary", b"\xff\xfe", 30)
    for _ in range(3):
        assert await registry.workers() == [WorkerInfo("ok", Role.DECODE, "a:1", 3, 4)]
    assert registry.ignored == 7
    assert len(caplog.records) == 7

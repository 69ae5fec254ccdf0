"""The registry while Redis is frozen, gone, empty after a restart, read-only, full, or asks for a password."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from contracts.workers import Role, WorkerInfo
from shared_state.backends import redis
from shared_state.backends.base import BackendUnavailable
from shared_state.registry import Registry
from tests.helpers.valkey import ValkeyServer

SOON = 20.0
INFO = WorkerInfo("decode-0", Role.DECODE, "127.0.0.1:7", 1, 42)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path) as running:
        yield running


@pytest.fixture
async def store(server: ValkeyServer) -> AsyncIterator[redis.RedisStore]:
    made = redis.create(server.url, recheck=0.1)
    yield made
    await made.close()


async def every_call_fails(store: redis.RedisStore) -> list[str]:
    """What put, delete, list and watch say."""
    reasons = []
    async with aclosing(store.watch("a:")) as changes:
        for call in (store.put("a:x", b"1", 1), store.delete("a:x", b"1"), store.list("a:"), anext(changes)):
            async with asyncio.timeout(5):
                with pytest.raises(BackendUnavailable) as caught:
                    await call
            reasons.append(str(caught.value))
    return reasons


async def test_frozen_server_holds_nobody_up(server: ValkeyServer, store: redis.RedisStore) -> None:
    await store.put("a:x", b"1", 60)  # a pooled connection that will freeze
    server.freeze()
    await every_call_fails(store)
    server.thaw()
    assert await store.list("a:") == {"a:x": b"1"}


async def test_absent_server(tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}/nothing.sock", "redis://127.0.0.1:1"):
        store = redis.create(url)
        await every_call_fails(store)
        await store.close()


async def test_read_only_and_full_server(server: ValkeyServer, store: redis.RedisStore) -> None:
    server.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(BackendUnavailable, match="maxmemory"):
        await store.put("a:x", b"1", 60)
    server.command("CONFIG", "SET", "maxmemory", "0")
    server.command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(BackendUnavailable, match="read only replica"):
        await store.put("a:x", b"1", 60)


async def test_wrong_password_is_told_without_showing_it(server: ValkeyServer) -> None:
    server.command("CONFIG", "SET", "requirepass", "right")
    socket = server.url.removeprefix("unix://")
    for url, says in ((f"unix://:wrong@{socket}", "WRONGPASS|invalid username-password"), (server.url, "[Aa]uth")):
        store = redis.create(url)
        with pytest.raises(BackendUnavailable, match=says) as caught:
            await store.list("a:")
        assert "wrong@" not in str(caught.value)
        await store.close()


def test_other_urls_are_refused() -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        redis.create("http://127.0.0.1:6379")


async def test_announcement_outlives_an_empty_restart(
    server: ValkeyServer, store: redis.RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    registry = Registry(store, "test", ttl=0.5)
    async with asyncio.timeout(SOON), aclosing(registry.watch()) as lists:
        announcing = asyncio.create_task(registry.announce(lambda: INFO))
        while await anext(lists) != [INFO]:
            pass
        server.kill()
        next_list = asyncio.ensure_future(anext(lists))
        await logged(caplog, "cannot watch the registry")
        await logged(caplog, "cannot announce this process")
        assert not next_list.done(), "an outage changes nothing"
        server.start()
        await logged(caplog, "can announce this process again")
        while await registry.workers() != [INFO]:
            await next_list
            next_list = asyncio.ensure_future(anext(lists))
        announcing.cancel()
        await asyncio.wait({announcing})
        while await next_list != []:
            next_list = asyncio.ensure_future(anext(lists))
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if line.startswith("cannot announce")]) == 1
    assert len([line for line in said if line.startswith("cannot watch")]) == 1


async def test_withdrawal_from_a_frozen_server_ends(server: ValkeyServer, store: redis.RedisStore) -> None:
    registry = Registry(store, "test")
    async with asyncio.timeout(SOON), aclosing(registry.watch()) as lists:
        announcing = asyncio.create_task(registry.announce(lambda: INFO))
        while await anext(lists) != [INFO]:
            pass
        server.freeze()
        announcing.cancel()
        await asyncio.wait({announcing})
        assert announcing.cancelled()


async def test_changes_are_told_without_waiting_for_the_recheck(server: ValkeyServer) -> None:
    store = redis.create(server.url, recheck=3600)
    async with asyncio.timeout(SOON), aclosing(store.watch("a:")) as changes:
        await anext(changes)
        await store.put("a:x", b"1", 60)
        await anext(changes)
        await store.put("a:x", b"2", 60)
        await anext(changes)
        await store.put("a:x", b"2", 60)  # a renewal is no change
        await store.delete("a:x", b"2")
        await anext(changes)
        assert await store.list("a:") == {}
        another = asyncio.ensure_future(anext(changes))
        await store.put("b:x", b"1", 60)
        assert not another.done()
        await store.put("a:x", b"1", 60)
        await another
    await store.close()


async def test_the_store_leaves_nothing_behind(server: ValkeyServer, store: redis.RedisStore) -> None:
    await store.put("a:x", b"1", 60)
    await store.put("a:y", b"1", 30)
    assert {server.command("PTTL", key) > 30_000 for key in ("a:x", "a:")} == {True}
    assert sorted(server.command("SMEMBERS", "a:")) == [b"a:x", b"a:y"]


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until a record says `text`."""
    said = asyncio.Event()

    class _Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                said.set()

    listener = _Listener()
    logging.getLogger().addHandler(listener)
    try:
        for record in caplog.records:
            listener.emit(record)
        await said.wait()
    finally:
        logging.getLogger().removeHandler(listener)

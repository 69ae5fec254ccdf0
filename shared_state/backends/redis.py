"""Shared values in Redis or Valkey. The only file that knows the redis client.

A value is a plain key with an expiry. The names of a directory are a set under the directory's own name,
so that listing costs what the directory holds and not what the server holds; the set lives as long as
somebody renews a value in it, and names whose value has lapsed are passed over. A change is published on
a channel of that name.

A server that is frozen, full, read-only or gone must never hold a caller for longer than the timeouts.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from contracts.errors import ConfigError
from shared_state.backends.base import BackendUnavailable

_CONNECT_TIMEOUT = 1.0  # seconds
_CALL_TIMEOUT = 2.0  # seconds, of one call with everything in it

_PUT = """
local before = redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2], 'GET')
redis.call('SADD', KEYS[2], KEYS[1])
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
if before ~= ARGV[1] then redis.call('PUBLISH', KEYS[2], KEYS[1]) end
"""
_DELETE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], KEYS[1])
redis.call('PUBLISH', KEYS[2], KEYS[1])
"""


class RedisStore:
    """shared_state.backends.base.Backend over one server.

    Redis does not tell when a key expires (short of settings that are not ours to make), so `watch` also
    yields each `recheck` seconds: an upper bound on how late a lapsed lease is noticed.
    """

    def __init__(self, client: "redis.Redis", where: str, recheck: float) -> None:
        self._client = client
        self._where = where
        self._recheck = recheck

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        async with self._bounded():
            await self._script(_PUT, key, value, max(1, round(ttl * 1000)))

    async def delete(self, key: str, expected: bytes) -> None:
        async with self._bounded():
            await self._script(_DELETE, key, expected)

    async def list(self, directory: str) -> dict[str, bytes]:
        async with self._bounded():
            members: Any = await self._client.smembers(directory)
            keys = sorted(members)
            values: list[Any] = await self._client.mget(keys) if keys else []
        return {key.decode(): value for key, value in zip(keys, values, strict=True) if value is not None}

    async def watch(self, directory: str) -> AsyncGenerator[None]:
        pubsub = self._client.pubsub()
        try:
            async with self._bounded():
                await pubsub.subscribe(directory)
                # The answer: what is put from here on is published to us.
                await pubsub.get_message(timeout=None)
            while True:
                yield
                async with self._bounded(self._recheck + _CALL_TIMEOUT):
                    await pubsub.get_message(timeout=self._recheck)
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]  # the client has no annotation here

    async def close(self) -> None:
        await self._client.aclose()

    async def _script(self, script: str, key: str, *values: bytes | int) -> None:
        directory = key[: key.rindex(":") + 1]
        await self._client.eval(script, 2, key, directory, *values)

    @asynccontextmanager
    async def _bounded(self, seconds: float = _CALL_TIMEOUT) -> AsyncIterator[None]:
        """Turns whatever goes wrong with the server, silence included, into BackendUnavailable."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise BackendUnavailable(f"redis at {self._where} does not answer") from error
        except (RedisError, OSError) as error:
            raise BackendUnavailable(f"redis at {self._where}: {error}") from error


def create(url: str, recheck: float = 2.5) -> RedisStore:
    """A store at redis://, rediss:// or unix:// `url`; connects when it is first used. `recheck`: see
    RedisStore, half the lease is a good value. Raises ConfigError for another kind of URL."""
    try:
        client = redis.Redis.from_url(
            url,
            # Calls are bounded here, as a whole: with a timeout of its own the client waits for a write in
            # asyncio.wait_for, which in Python 3.11 can swallow a cancel.
            socket_timeout=None,
            socket_connect_timeout=_CONNECT_TIMEOUT,
            # One retry at once, for a pooled connection that a restarted server has closed.
            retry=Retry(NoBackoff(), 1, (RedisConnectionError,)),
            protocol=2,
        )
    except ValueError as error:
        raise ConfigError(f"cluster.redis_url: {error}", param="cluster.redis_url") from error
    return RedisStore(client, url.partition("?")[0].rpartition("@")[2], recheck)

"""Streams of a served cluster that a test follows while it breaks something."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

_SECONDS = 240.0


class Stream:
    """One streamed completion, as far as it has come. `error`: the error object of the answer or of its last
    event, or how the connection broke; `closed`: its last event was [DONE]."""

    def __init__(self) -> None:
        self.text = ""
        self.pieces = 0
        self.finish = ""
        self.status = 0
        self.done = False
        self.closed = False
        self.error: dict[str, Any] = {}
        self._news = asyncio.Event()

    async def until(self, pieces: int) -> None:
        """Returns when so many pieces have come; fails when the stream ends before."""
        while self.pieces < pieces:
            assert not self.done, f"ended after {self.pieces} pieces: {self.error}"
            self._news.clear()
            await self._news.wait()

    async def ended(self) -> None:
        """Returns when nothing more can come."""
        while not self.done:
            self._news.clear()
            await self._news.wait()

    async def run(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        """Read to the end."""
        try:
            async with client.stream("POST", "/v1/completions", json={"stream": True} | body) as response:
                self.status = response.status_code
                if self.status != httpx.codes.OK:
                    self.error = json.loads(await response.aread())["error"]
                async for line in response.aiter_lines():
                    self._take(line)
        except httpx.TransportError as error:
            self.error = {"code": type(error).__name__}
        finally:
            self.done = True
            self._news.set()

    def _take(self, line: str) -> None:
        data = line.removeprefix("data: ")
        if data == line:
            return
        if data == "[DONE]":
            self.closed = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        (choice,) = event["choices"]
        if choice["text"]:
            self.text += choice["text"]
            self.pieces += 1
        self.finish = choice["finish_reason"] or self.finish
        self._news.set()


@asynccontextmanager
async def streams(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> AsyncIterator[list[Stream]]:
    """All at once; they have ended, one way or another, behind the block."""
    made = [Stream() for _ in bodies]
    async with asyncio.timeout(_SECONDS), asyncio.TaskGroup() as tasks:
        for stream, body in zip(made, bodies, strict=True):
            tasks.create_task(stream.run(client, body))
        yield made

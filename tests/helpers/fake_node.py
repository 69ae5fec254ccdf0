"""A node that serves one TCP greeting: enough to see whether an actor shell really serves."""

import asyncio
import os
import time

from contracts.config import Config
from contracts.errors import StartupError
from contracts.workers import Role, WorkerInfo


class FakeNode:
    """Greets every connection with its incarnation. A model named "broken" fails to start as nodes do, one
    named "bug" as no node should."""

    def __init__(self, config: Config, role: Role, node_id: str) -> None:
        self._config = config
        self._role = role
        self._id = node_id
        self._incarnation = time.time_ns()
        self._server: asyncio.Server | None = None
        self._ended = asyncio.Event()

    async def start(self) -> WorkerInfo:
        if self._config.model.name == "broken" and self._role is Role.DECODE:
            raise StartupError("the file of the model is broken")
        if self._config.model.name == "bug":
            raise KeyError("nobody thought of this")
        self._server = await asyncio.start_server(self._greet, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return WorkerInfo(self._id, self._role, f"127.0.0.1:{port}", self._incarnation, os.getpid())

    async def ended(self) -> None:
        await self._ended.wait()

    async def stop(self, grace: float) -> None:
        self._ended.set()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Also answers an HTTP GET, so that it can be a router that is ready."""
        line = await reader.readline()
        body = str(self._incarnation)
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n" if line.strip() else ""
        writer.write((head + body).encode())
        await writer.drain()
        writer.close()


def build_fake_node(config: Config, role: Role, node_id: str) -> FakeNode:
    """As cluster.nodes.build_node."""
    return FakeNode(config, role, node_id)

"""The embedded server, for real: answers, ends with stop() and with its parent, and says why it cannot start."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.embedded_redis import EmbeddedRedis
from contracts.errors import StartupError
from tests.helpers.processes import descendants, ended


async def test_starts_private_answers_and_stops(tmp_path: Path, others: set[int]) -> None:
    server = EmbeddedRedis(tmp_path)
    await server.start()
    path = Path(server.url.removeprefix("unix://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(b"PING\r\nCONFIG GET save\r\nCONFIG GET appendonly\r\nCONFIG GET port\r\n")
    answer = await reader.readuntil(b"port\r\n$1\r\n0\r\n")
    assert answer.startswith(b"+PONG\r\n")
    assert b"save\r\n$0\r\n\r\n" in answer
    assert b"appendonly\r\n$2\r\nno\r\n" in answer
    writer.close()
    await writer.wait_closed()
    children = descendants(os.getpid()) - others
    await server.stop()
    await server.stop()
    await ended(children)
    with pytest.raises((FileNotFoundError, ConnectionRefusedError)):
        await asyncio.open_unix_connection(str(path))


async def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from cluster.embedded_redis import EmbeddedRedis\n"
        "async def main():\n"
        "    await EmbeddedRedis(Path(sys.argv[1])).start()\n"
        "    print('up', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        children = descendants(parent.pid)
        assert len(children) == 1
        parent.send_signal(signal.SIGKILL)
        await ended(children)


async def test_one_line_when_it_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot run Valkey: .* is missing"):
        await EmbeddedRedis(tmp_path, tmp_path / "absent").start()
    for content, message in (
        ("#!/bin/sh\necho no memory for you\nexit 1\n", "Valkey ended while it started: no memory for you"),
        ("#!/nowhere/sh\n", "Valkey ended while it started: .*No such file"),
    ):
        binary = tmp_path / "server"
        binary.write_text(content)
        binary.chmod(0o700)
        server = EmbeddedRedis(tmp_path, binary)
        with pytest.raises(StartupError, match=message):
            await server.start()
        await server.stop()

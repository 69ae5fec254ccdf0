"""Where nodes run: Ray, our own on this machine or an existing cluster. The only caller of ray.init.

cluster/launch.py owns one RayPlacement. Every call that can wait for Ray runs on one thread that lives as
long as the placement: the kernel ends Ray's processes with the thread that started them.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from cluster.actors import BuildNode, NodeActor
from contracts.config import ClusterConfig, Config
from contracts.errors import ErrorInfo, StartupError
from contracts.workers import Role, WorkerInfo

T = TypeVar("T")

# Nothing of ours goes through the object store; Ray accepts no less than 75 MiB.
_OBJECT_STORE_BYTES = 80_000_000
_JOIN_SECONDS = 3.0


class PlacedNode:
    """One named actor: a handle that survives the actor's restarts."""

    def __init__(self, node_id: str, role: Role, actor: Any) -> None:
        self.id = node_id
        self.role = role
        self.actor = actor

    async def describe(self) -> WorkerInfo:
        """Who serves, once its start has ended. Raises the error of the start, or StartupError."""
        from ray.exceptions import RayError

        try:
            outcome: WorkerInfo | ErrorInfo = await self.actor.describe.remote()
        except RayError as error:
            raise StartupError(f"{self.id} died while it started: {_first_line(error)}") from error
        if isinstance(outcome, ErrorInfo):
            raise outcome.to_error()
        return outcome

    async def stop(self, grace: float) -> None:
        """Drain for at most `grace` seconds and stop serving; a node that is dead has stopped."""
        from ray.exceptions import RayActorError

        try:
            await self.actor.stop.remote(grace)
        except RayActorError:
            return


class RayPlacement:
    """A connection to Ray and the actors placed through it. `ray_address` "": start a Ray of our own."""

    def __init__(self, cluster: ClusterConfig, directory: Path) -> None:
        """`directory`: private and short (Ray keeps Unix sockets in it, whose paths end at 107 bytes)."""
        self._cluster = cluster
        self._directory = directory / "ray"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._placed: list[PlacedNode] = []

    @property
    def logs(self) -> str:
        """Where the nodes write, while our own Ray runs."""
        return "" if self._cluster.ray_address else str(self._directory / "session_latest" / "logs")

    async def open(self) -> int:
        """Start or join Ray; the number of its machines. Call from the main thread. Raises StartupError."""
        machines = await self._call(self._connect)
        # Ray prints a stack at SIGTERM before it hands the signal on: take it back.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        return machines

    async def place(self, build: BuildNode, config: Config, role: Role, node_id: str) -> PlacedNode:
        """An actor that is starting; PlacedNode.describe waits for it. Raises StartupError."""
        placed = await self._call(lambda: PlacedNode(node_id, role, self._create(build, config, role, node_id)))
        self._placed.append(placed)
        return placed

    async def close(self) -> None:
        """End every actor, then Ray, and wait for it. Idempotent, also while or after open() fails."""
        await self._call(self._disconnect)
        self._thread.shutdown()

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _connect(self) -> int:
        address = self._cluster.ray_address
        if address:
            _check_listening(address)
        else:
            _configure_own_ray()
        # Ray reads its environment when it is imported, and takes a third of a second.
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        own = {
            "num_cpus": 0,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "_temp_dir": str(self._directory),
        }
        try:
            ray.init(
                address=address or "local",
                namespace=self._cluster.namespace,
                log_to_driver=False,
                configure_logging=False,
                **({} if address else own),
            )
            return sum(1 for node in ray.nodes() if node["Alive"])
        except (OSError, RuntimeError, ValueError) as error:
            what = f"cannot join the Ray cluster at {address}" if address else "cannot start Ray"
            raise StartupError(f"{what}: {_first_line(error)}") from error

    def _create(self, build: BuildNode, config: Config, role: Role, node_id: str) -> Any:
        import ray

        # No CPUs are claimed: a node's share is engine.threads. Not detached: actors end with this process.
        options = {"name": node_id, "num_cpus": 0, "max_restarts": -1, "max_concurrency": 4}
        try:
            return ray.remote(NodeActor).options(**options).remote(build, config, role, node_id)
        except ValueError as error:
            raise StartupError(
                f"{node_id} already runs in the namespace {self._cluster.namespace!r} of this Ray cluster"
            ) from error

    def _disconnect(self) -> None:
        import ray

        if not ray.is_initialized():
            return
        for placed in self._placed:
            ray.kill(placed.actor, no_restart=True)
        self._placed.clear()
        ray.shutdown()


def _configure_own_ray() -> None:
    """Settings that Ray takes from the environment only, and hands on to its processes."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a peer that was killed is no news for its own library
    # Ray's sockets run code for whoever may connect: a token per run, instead of one in the home directory.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Despite its name this decides on every system whether Ray listens beyond the loopback interface.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def _check_listening(address: str) -> None:
    """Raises StartupError when nobody listens at HOST:PORT: Ray itself would try for more than a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), _JOIN_SECONDS).close()
        except OSError as error:
            raise StartupError(f"cannot join the Ray cluster at {address}: {error.strerror or error}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

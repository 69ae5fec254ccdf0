"""Starts a whole cluster on this machine (or a Ray cluster) and takes it down again: `pdserve up`.

launch() opens things in an order that an exit stack undoes, whatever fails and whenever it is cancelled.
Nothing here serves a request.
"""

import asyncio
import dataclasses
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from cluster.actors import BuildNode, Node
from cluster.embedded_redis import EmbeddedRedis
from cluster.placement import PlacedNode, RayPlacement
from cluster.run_file import DIRECTORY_PREFIX, RunFile, RunRecord, start_ticks
from contracts.config import Config
from contracts.errors import StartupError
from contracts.seams import load_plug
from contracts.workers import Role, WorkerInfo
from router.listening import listen
from shared_state.backends.base import BackendUnavailable
from text.model_resolver import resolve_model

logger = logging.getLogger(__name__)

Say = Callable[[str], None]

_START_SECONDS = 600.0  # a node that dies while it starts is started again until then
_READY_SECONDS = 60.0
_READY_INTERVAL = 0.1
_LONGEST_ROOT = 20  # Ray adds 85 bytes to make the path of a Unix socket, which ends at 107
_STOP_MARGIN = 2.0  # beyond the grace: what a node may need to end its sockets


class RunningCluster:
    """Serves until close(). Made by launch()."""

    def __init__(self, nodes: list[PlacedNode], record: RunRecord, stack: AsyncExitStack) -> None:
        self._nodes = nodes
        self._stack = stack
        self.record = record

    async def drain(self, grace: float) -> None:
        """Routers stop admitting and finish what runs, for at most `grace` seconds; then workers stop."""
        for roles, seconds in (({Role.ROUTER}, grace), ({Role.PREFILL, Role.DECODE}, 0.0)):
            try:
                async with asyncio.timeout(seconds + _STOP_MARGIN), asyncio.TaskGroup() as group:
                    for node in self._nodes:
                        if node.role in roles:
                            group.create_task(node.stop(seconds))
            except TimeoutError:
                logger.warning("not everything stopped within %.0f s", seconds + _STOP_MARGIN)

    async def close(self) -> None:
        """End every process and remove every file of this cluster. Idempotent."""
        await self._stack.aclose()


async def launch(config: Config, say: Say, build: BuildNode | None = None) -> RunningCluster:
    """A cluster whose router answers /ready with 200. `say` gets one line a stage.

    Raises PdserveError (StartupError mostly) with everything taken down again; so does a cancel.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time()

    def stage(what: str) -> None:
        say(f"{loop.time() - begin:5.1f} s  {what}")

    async with AsyncExitStack() as stack:
        run_file = RunFile(config.model.cache_path(), config.cluster.namespace)
        directory = _private_directory(stack)
        pid = os.getpid()
        record = RunRecord(pid, start_ticks(pid) or 0, config.cluster.namespace, str(directory))
        run_file.claim(record)
        stack.callback(run_file.remove)

        _check_ports(config)
        files = await asyncio.to_thread(resolve_model, config.model, stage)
        stage(f"model {config.model.name} is here")
        own_redis_url = await _open_redis(config, directory, stack, stage)
        placement = RayPlacement(config.cluster, directory)
        machines = await _open_ray(placement, stack, stage)
        config = prepare(config, files.metadata.name, own_redis_url)
        _check_reach(config, own_redis=own_redis_url != "", machines=machines)
        nodes, infos = await _place_all(placement, build or _build_in_actor, config, stage)
        router = next(info.address for info in infos if info.role is Role.ROUTER)
        await _until_ready(router)

        host = config.router.host
        record = dataclasses.replace(
            record, redis_url=config.cluster.redis_url, http=router, grpc=f"{host}:{config.router.grpc_port}"
        )
        run_file.update(record)
        stage(f"ready; logs in {placement.logs}" if placement.logs else "ready")
        for line in _greeting(config, record):
            say(line)
        return RunningCluster(nodes, record, stack.pop_all())


def prepare(config: Config, model_name: str, own_redis_url: str = "") -> Config:
    """The configuration that every node gets: names, addresses, secrets and threads filled in."""
    cluster = dataclasses.replace(
        config.cluster,
        redis_url=own_redis_url or config.cluster.redis_url,
        secret=config.cluster.secret or secrets.token_hex(32),
        hash_key=config.cluster.hash_key or secrets.token_hex(32),
    )
    workers = sum(role is not Role.ROUTER for role, _ in node_ids(config))
    threads = config.engine.threads or max(1, len(os.sched_getaffinity(0)) // workers)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, served_name=config.model.served_name or model_name),
        cluster=cluster,
        engine=dataclasses.replace(config.engine, threads=threads),
    )


def node_ids(config: Config) -> list[tuple[Role, str]]:
    """Every node of the cluster. An aggregated worker is a decode worker without a source."""
    counts = {
        Role.PREFILL: config.cluster.prefill if config.cluster.mode == "disaggregated" else 0,
        Role.DECODE: config.cluster.decode,
        Role.ROUTER: config.cluster.routers,
    }
    return [(role, f"{role.value}-{number}") for role, count in counts.items() for number in range(count)]


def _private_directory(stack: AsyncExitStack) -> Path:
    root = tempfile.gettempdir()
    if len(root) > _LONGEST_ROOT:
        root = "/tmp"  # noqa: S108 - mkdtemp makes a private directory in it
    directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=root))
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _check_ports(config: Config) -> None:
    """Says at once what the router would find out seconds later, where it will run on this machine."""
    if not config.cluster.ray_address:
        for port, purpose in ((config.router.http_port, "HTTP"), (config.router.grpc_port, "gRPC")):
            listen(config.router.host, port, purpose).close()


async def _open_ray(placement: RayPlacement, stack: AsyncExitStack, stage: Say) -> int:
    stack.push_async_callback(placement.close)
    machines = await placement.open()
    stage("Ray is up")
    return machines


async def _open_redis(config: Config, directory: Path, stack: AsyncExitStack, stage: Say) -> str:
    """The URL of our own server, "" when one was given. Either answers."""
    url = config.cluster.redis_url
    if not url:
        server = EmbeddedRedis(directory)
        stack.push_async_callback(server.stop)
        await server.start()
        stage("Valkey is up")
        return server.url
    try:
        backend = load_plug("registry", "redis").create(url)
        try:
            await backend.list(f"pdserve:{config.cluster.namespace}:")
        finally:
            await backend.close()
    except BackendUnavailable as error:
        raise StartupError(f"--redis-url cannot be used: {error}") from error
    stage("Redis answers")
    return ""


def _check_reach(config: Config, *, own_redis: bool, machines: int) -> None:
    if machines > 1 and (own_redis or config.cluster.host in ("127.0.0.1", "localhost", "::1")):
        raise StartupError(
            f"a Ray cluster of {machines} machines needs --redis-url and --set cluster.host=ADDRESS: "
            "our own Valkey and 127.0.0.1 are reached from this machine only"
        )


async def _place_all(
    placement: RayPlacement, build: BuildNode, config: Config, stage: Say
) -> tuple[list[PlacedNode], list[WorkerInfo]]:
    """All nodes at once: they load the model in parallel. Raises the first error of any."""

    async def start(role: Role, node_id: str) -> tuple[PlacedNode, WorkerInfo]:
        node = await placement.place(build, _own_share(config, role, node_id), role, node_id)
        try:
            async with asyncio.timeout(_START_SECONDS):
                info = await node.describe()
        except TimeoutError:
            raise StartupError(f"{node_id} did not start within {_START_SECONDS:.0f} s; its log says why") from None
        stage(f"{node_id} serves on {info.address}")
        return node, info

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(start(role, node_id)) for role, node_id in node_ids(config)]
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors
    return [task.result()[0] for task in tasks], [task.result()[1] for task in tasks]


def _own_share(config: Config, role: Role, node_id: str) -> Config:
    """The first router has the configured ports; the system chooses those of further ones."""
    if role is not Role.ROUTER or node_id == "router-0":
        return config
    return dataclasses.replace(config, router=dataclasses.replace(config.router, http_port=0, grpc_port=0))


def _build_in_actor(config: Config, role: Role, node_id: str) -> Node:
    # Imported in the node's process only: the launcher needs neither torch nor its second of import.
    from cluster.nodes import build_node

    return build_node(config, role, node_id)


async def _until_ready(address: str) -> None:
    """Another process's readiness over HTTP has no event to wait for, so this one place asks again."""
    answer = "no answer"
    try:
        async with asyncio.timeout(_READY_SECONDS), httpx.AsyncClient(trust_env=False) as client:
            while True:
                try:
                    response = await client.get(f"http://{address}/ready")
                except httpx.TransportError as error:
                    answer = str(error) or type(error).__name__
                else:
                    if response.status_code == httpx.codes.OK:
                        return
                    answer = response.text
                await asyncio.sleep(_READY_INTERVAL)
    except TimeoutError:
        raise StartupError(f"the router was not ready within {_READY_SECONDS:.0f} s: {answer}") from None


def _greeting(config: Config, record: RunRecord) -> list[str]:
    body = {
        "model": config.model.served_name,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "temperature": 0,
        "stream": True,
    }
    header = "-H 'Content-Type: application/json'"
    lines = [f"\n  HTTP  http://{record.http}"]
    if config.router.grpc_port:
        lines.append(f"  gRPC  {record.grpc}")
    lines.append(f"\n  curl -N http://{record.http}/v1/chat/completions {header} \\\n    -d '{json.dumps(body)}'\n")
    return lines


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first cause: the rest are its consequences."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

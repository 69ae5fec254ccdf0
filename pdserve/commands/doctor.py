"""`pdserve doctor`: what would keep `pdserve up` from working here, each with its remedy."""

import asyncio
import importlib
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from cluster.embedded_redis import EmbeddedRedis
from contracts.config import Config, parse_bytes
from contracts.errors import PdserveError, StartupError
from contracts.seams import load_plug
from engine.available_memory import available_memory
from pdserve.commands.options import CacheDir, ConfigFile, Settings, configuration
from shared_state.backends.base import BackendUnavailable

Check = Callable[[Config], str]

_PACKAGES = ("torch", "ray", "grpcio", "protobuf", "redis", "tokenizers", "fastapi")
_LEAST_FILES = 1024
_LEAST_SHARED_MEMORY = 80_000_000
_BESIDE_THE_POOL = 1 << 30  # bytes of a worker apart from its KV pool: interpreter, torch, a small model


def doctor(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Do not start Ray.")] = False,
    cache_dir: CacheDir = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Check this machine: each line is ok, or says what to do. Exit code 1 when something fails."""
    tree = configuration(config, settings, model__cache_dir=cache_dir)
    failed = False
    for name, check in _checks(quick=quick):
        try:
            typer.echo(f"ok    {name}: {check(tree)}")
        except PdserveError as error:
            failed = True
            typer.echo(f"FAIL  {name}: {error.message}")
    if failed:
        raise typer.Exit(1)


def _checks(*, quick: bool) -> Iterator[tuple[str, Check]]:
    yield "python", _python
    yield "packages", _packages
    yield "torch", _torch
    yield "cache", _cache
    yield "model", _model
    yield "ports", _ports
    yield "memory", _memory
    yield "shared memory", _shared_memory
    yield "open files", _open_files
    yield "valkey", _valkey
    yield "links", _links
    if not quick:
        yield "ray", _ray


def _python(_: Config) -> str:
    if sys.platform != "linux":
        raise StartupError(f"pdserve runs on Linux, not on {sys.platform}; use a container or a virtual machine")
    return f"{platform.python_version()} on {platform.platform()}"


def _packages(_: Config) -> str:
    return ", ".join(f"{name} {version(name)}" for name in _PACKAGES)


def _torch(_: Config) -> str:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise StartupError(f"torch cannot be imported ({error}); install it again") from error
    return f"imports, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads by default"


def _cache(config: Config) -> str:
    path = config.model.cache_path()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            free = shutil.disk_usage(path).free
    except OSError as error:
        raise StartupError(f"{path} cannot be written ({error.strerror}); choose another with PDSERVE_CACHE") from error
    return f"{path} is writable, {free / 1e9:.1f} GB free"


def _model(config: Config) -> str:
    from text.model_resolver import resolve_model

    files = resolve_model(config.model, lambda line: typer.echo(f"      {line}"))
    return f"{config.model.name} is at {files.path}"


def _ports(config: Config) -> str:
    host = config.router.host
    ports = {"http": config.router.http_port, "grpc": config.router.grpc_port}
    for name, port in ports.items():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise StartupError(
                    f"{host}:{port} cannot be bound ({error.strerror}); choose another with --{name}-port"
                ) from error
    return f"{', '.join(map(str, ports.values()))} on {host} can be bound"


def _memory(config: Config) -> str:
    workers = config.cluster.decode + (config.cluster.prefill if config.cluster.mode == "disaggregated" else 0)
    needed = workers * (parse_bytes("kv.memory", config.kv.memory) + _BESIDE_THE_POOL)
    available = available_memory()
    if available < needed:
        raise StartupError(
            f"{available / 1e9:.1f} GB are available, {workers} workers take about {needed / 1e9:.1f} GB; "
            "lower --kv-memory or start fewer workers"
        )
    return f"{available / 1e9:.1f} GB available, {workers} workers take about {needed / 1e9:.1f} GB"


def _shared_memory(_: Config) -> str:
    path = Path("/dev/shm")  # noqa: S108 - Ray's object store lives there, we only ask for its size
    free = shutil.disk_usage(path).free if path.is_dir() else 0
    if free < _LEAST_SHARED_MEMORY:
        raise StartupError(f"{path} has {free / 1e6:.0f} MB free, Ray wants 80; in Docker give --shm-size=256m")
    return f"{free / 1e6:.0f} MB free in {path}"


def _open_files(_: Config) -> str:
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_FILES:
        raise StartupError(f"the limit is {limit}; raise it with `ulimit -n {_LEAST_FILES * 4}`")
    return f"limit {limit}"


def _valkey(_: Config) -> str:
    async def ping(directory: Path) -> None:
        server = EmbeddedRedis(directory)
        try:
            await server.start()
            backend = load_plug("registry", "redis").create(server.url)
            try:
                await backend.list("pdserve:doctor:")
            finally:
                await backend.close()
        except BackendUnavailable as error:
            raise StartupError(f"it starts and does not answer: {error}") from error
        finally:
            await server.stop()

    with tempfile.TemporaryDirectory(prefix="pdserve-") as directory:
        asyncio.run(ping(Path(directory)))
    return "starts and answers"


def _links(config: Config) -> str:
    from cluster.link_check import measure_links

    found = asyncio.run(measure_links(config))
    working = [f"{name} {rate / 1e9:.1f} GB/s" for name, rate in found.items() if isinstance(rate, float)]
    broken = [f"{name} does not work here: {reason}" for name, reason in found.items() if isinstance(reason, str)]
    if not working:
        raise StartupError("; ".join(broken))
    return ", ".join([*working, *broken])


def _ray(config: Config) -> str:
    from cluster.placement import RayPlacement

    async def start(directory: Path) -> int:
        placement = RayPlacement(config.cluster, directory)
        try:
            return await placement.open()
        finally:
            await placement.close()

    with tempfile.TemporaryDirectory(prefix="pdserve-", ignore_cleanup_errors=True) as directory:
        machines = asyncio.run(start(Path(directory)))
    return f"starts, {machines} machine" if not config.cluster.ray_address else f"joins, {machines} machine(s)"

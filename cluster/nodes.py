"""What a process of the cluster consists of: the composition of a worker and of a router.

cluster/actors.py runs one node per Ray actor; cluster/local.py composes the same parts in one process. No
other module knows all of them.
"""

import asyncio
import os
import time
from contextlib import AsyncExitStack

from cluster.actors import Node
from cluster.addresses import bracketed
from cluster.freed_memory import keep_freed_memory
from contracts.config import Config
from contracts.errors import StartupError
from contracts.seams import load_plug
from contracts.workers import Role, WorkerInfo
from engine.runners.base import Runner
from protos.links.base import Link
from router.assembly import build_service
from router.fleet import WorkerSource
from router.frontends import RouterFrontends
from router.service import RouterService
from router.sessions import ModelIdentity
from shared_state.backends.base import Backend, BackendUnavailable
from shared_state.registry import Registry
from telemetry.exporters import create_tracing
from telemetry.metrics import RouterMetrics
from telemetry.tracing import Tracing
from text.model_resolver import ModelFiles, resolve_model
from text.text_processor import TextProcessor
from worker.core import Vocabulary, WorkerCore
from worker.host import MakeRole, WorkerHost


class WorkerNode:
    """A prefill or decode worker in a process of its own."""

    def __init__(self, config: Config, role: Role, node_id: str) -> None:
        self._config = config
        self._role = role
        self._id = node_id
        self._host: WorkerHost | None = None
        self._grace = 0.0
        self._open = AsyncExitStack()

    async def start(self) -> WorkerInfo:
        """Load the model and serve. Raises StartupError."""
        config, closing = self._config, self._open.push_async_callback
        keep_freed_memory()
        files = await asyncio.to_thread(resolve_model, config.model, _quiet)
        backend = await _open_backend(config)
        closing(backend.close)
        text, runner = await asyncio.to_thread(load_model, config, files)
        closing(runner.close)
        tracing = create_tracing(config.telemetry, "pdserve", self._role.value, self._id)
        closing(tracing.close)
        self._host = host = build_host(
            config,
            WorkerInfo(self._id, self._role, f"{bracketed(config.cluster.host)}:0", time.time_ns(), os.getpid()),
            runner=runner,
            vocabulary=vocabulary_of(config, text),
            link=load_plug("link", "grpc").create(),
            registry=Registry(backend, config.cluster.namespace),
            tracing=tracing,
        )
        info = await host.start()
        closing(lambda: host.stop(self._grace))
        return info

    async def ended(self) -> None:
        """See Node."""
        assert self._host is not None
        await self._host.ended()

    async def stop(self, grace: float) -> None:
        """Drain, then end everything that was opened. Idempotent."""
        self._grace = grace
        await self._open.aclose()


class RouterNode:
    """A router with both public frontends in a process of its own."""

    def __init__(self, config: Config, node_id: str) -> None:
        self._config = config
        self._id = node_id
        self._service: RouterService | None = None
        self._grace = 0.0
        self._open = AsyncExitStack()

    async def start(self) -> WorkerInfo:
        """Serve the public ports; workers are found through the registry. Raises StartupError."""
        config, closing = self._config, self._open.push_async_callback
        files = await asyncio.to_thread(resolve_model, config.model, _quiet)
        text = await asyncio.to_thread(TextProcessor, files)
        backend = await _open_backend(config)
        closing(backend.close)
        tracing = create_tracing(config.telemetry, "pdserve", Role.ROUTER.value, self._id)
        closing(tracing.close)
        link = load_plug("link", "grpc").create()
        closing(link.close)
        registry = Registry(backend, config.cluster.namespace)
        incarnation = time.time_ns()
        self._service = service = build_router(
            config,
            router_id=self._id,
            incarnation=incarnation,
            link=link,
            registry=registry,
            identity=ModelIdentity(text.metadata.fingerprint, text.tokenizer.fingerprint),
            tracing=tracing,
        )
        frontends = RouterFrontends(config, service, text)
        closing(frontends.stop, 1.0)
        ports = await frontends.start()
        closing(service.stop)
        service.start()
        address = f"{bracketed(config.router.host)}:{ports.http}"
        info = WorkerInfo(self._id, Role.ROUTER, address, incarnation, os.getpid())
        closing(lambda: service.drain(self._grace))
        announcing = asyncio.create_task(registry.announce(lambda: info))
        closing(_cancel, announcing)
        return info

    async def ended(self) -> None:
        """See Node."""
        assert self._service is not None
        await self._service.ended()

    async def stop(self, grace: float) -> None:
        """Refuse new requests, let running ones end, then close everything that was opened. Idempotent."""
        self._grace = grace
        await self._open.aclose()


def build_node(config: Config, role: Role, node_id: str) -> Node:
    """The node of a role; config.cluster.redis_url names the registry."""
    return RouterNode(config, node_id) if role is Role.ROUTER else WorkerNode(config, role, node_id)


def load_model(config: Config, files: ModelFiles) -> tuple[TextProcessor, Runner]:
    """Tokenizer, weights and KV pool. Takes seconds. Raises ModelError, StartupError."""
    text = TextProcessor(files)
    plug = load_plug("runner", config.engine.runner)
    runner: Runner = plug.create(files, config.engine, config.model, config.kv, text.tokenizer.fingerprint)
    return text, runner


def vocabulary_of(config: Config, text: TextProcessor) -> Vocabulary:
    """What a worker needs to know of a model's text."""
    most = text.metadata.max_context
    return Vocabulary(text.tokenizer, text.metadata.eos_ids, min(config.model.max_context or most, most))


def build_host(
    config: Config,
    info: WorkerInfo,
    *,
    runner: Runner,
    vocabulary: Vocabulary,
    link: Link,
    registry: Registry,
    tracing: Tracing,
) -> WorkerHost:
    """A worker that is not started yet. `info.address` is where it will listen ("host:0": any port)."""
    core = WorkerCore(config, info, runner, vocabulary, tracing)
    return WorkerHost(core, _make_role(info.role), link, registry)


def build_router(
    config: Config,
    *,
    router_id: str,
    incarnation: int,
    link: Link,
    registry: WorkerSource,
    identity: ModelIdentity,
    tracing: Tracing,
) -> RouterService:
    """A router without frontends that is not started yet."""
    metrics = RouterMetrics()
    return build_service(
        config,
        router_id=router_id,
        incarnation=incarnation,
        link=link,
        registry=registry,
        identity=identity,
        tracing=tracing,
        observer=metrics,
        exposition=metrics.exposition,
    )


def _make_role(role: Role) -> MakeRole:
    # Each role is imported only by the process that plays it.
    if role is Role.PREFILL:
        from prefill_workers import worker as prefill

        return prefill.create
    from decode_workers import worker as decode

    return decode.create


async def _open_backend(config: Config) -> Backend:
    backend: Backend = load_plug("registry", "redis").create(config.cluster.redis_url)
    try:
        await backend.list("pdserve:")
    except BackendUnavailable as error:
        await backend.close()
        raise StartupError(f"the registry cannot be used: {error}") from error  # which names it without a password
    return backend


def _quiet(line: str) -> None:
    """`up` has fetched the model; a worker has nothing to tell about it."""


async def _cancel(task: "asyncio.Task[None]") -> None:
    """End a task of ours and wait for its end."""
    task.cancel()
    await asyncio.wait({task})

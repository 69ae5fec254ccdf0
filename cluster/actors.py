"""The Ray actor round one node: a thin shell, so that everything that serves also runs without Ray.

cluster/placement.py makes one per router and worker. Serving starts in the constructor: an actor that Ray
restarts after a crash serves again, as a new incarnation. Only configuration comes in and only
descriptions go out; no request and no token ever passes through here.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

import uvloop

from contracts.config import Config
from contracts.errors import ErrorInfo, PdserveError, StartupError
from contracts.workers import Role, WorkerInfo

logger = logging.getLogger(__name__)

_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 30.0


class Node(Protocol):
    """A router or worker that can run in any event loop."""

    async def start(self) -> WorkerInfo:
        """Serves when this returns. Raises StartupError."""

    async def stop(self, grace: float) -> None:
        """Drains for at most `grace` seconds, then stops and frees everything. Idempotent; also after a start
        that failed."""

    async def ended(self) -> None:
        """Returns or raises when the node serves no more, whatever the reason."""


BuildNode = Callable[[Config, Role, str], Node]


class NodeActor:
    """One node on an event loop in a thread of its own, so that Ray's calls never wait for a step.

    The constructor blocks until the node serves or has failed, and never raises: Ray would restart a
    constructor that raises for ever, and would wrap the reason into a traceback.
    """

    def __init__(self, build: BuildNode, config: Config, role: Role, node_id: str, restarted: bool | None = None):
        logging.basicConfig(
            level=config.telemetry.log_level.upper(),
            format=f"%(asctime)s {node_id} %(levelname)s %(name)s: %(message)s",
        )
        self._build, self._config, self._role, self._id = build, config, role, node_id
        self._node: Node | None = None
        self._stopping = False
        self._watching: asyncio.Task[None] | None = None
        self._loop = uvloop.new_event_loop()
        # Daemon: the process ends with its actor, whatever the node still does.
        threading.Thread(target=self._loop.run_forever, name=node_id, daemon=True).start()
        again = _was_restarted() if restarted is None else restarted
        starting = asyncio.run_coroutine_threadsafe(self._start(again), self._loop)
        self._outcome: WorkerInfo | ErrorInfo = starting.result()

    def describe(self) -> WorkerInfo | ErrorInfo:
        """Who serves here, or why nobody does."""
        return self._outcome

    def stop(self, grace: float) -> None:
        """Drain for at most `grace` seconds and stop serving. Idempotent."""
        self._stopping = True
        if self._node is not None:
            asyncio.run_coroutine_threadsafe(self._node.stop(grace), self._loop).result()

    async def _start(self, again: bool) -> WorkerInfo | ErrorInfo:
        """The first start reports its failure; after a crash nobody is asking, so it is tried again."""
        backoff = _FIRST_BACKOFF
        while True:
            outcome = await self._start_once()
            if isinstance(outcome, WorkerInfo) or not again:
                return outcome
            logger.error("start after a crash failed, next try in %.0f s: %s", backoff, outcome.message)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF)

    async def _start_once(self) -> WorkerInfo | ErrorInfo:
        node = self._build(self._config, self._role, self._id)
        try:
            info = await node.start()
        except PdserveError as error:
            logger.info("start failed", exc_info=True)
            outcome = error.info()
        except Exception as error:
            logger.exception("start failed")
            outcome = StartupError(f"{self._id} cannot start: {type(error).__name__}: {error}").info()
        else:
            self._node = node
            self._watching = asyncio.create_task(self._watch(node))
            return info
        await node.stop(0.0)
        return outcome

    async def _watch(self, node: Node) -> None:
        """A node that ends by itself ends its process: Ray starts another one."""
        try:
            await node.ended()
        except Exception:
            logger.exception("%s has failed", self._id)
        if not self._stopping:
            logger.critical("%s serves no more; its process ends", self._id)
            os._exit(1)


def _was_restarted() -> bool:
    # Imported here: the module is also imported where no Ray runs.
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)

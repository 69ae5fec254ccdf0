"""Everything of one worker that moves KV: what it gives (exporting.py) and what it takes, over shared transports.

Both roles own one and say what they do with it; worker/host.py opens and closes it through the role.
"""

import asyncio
from collections.abc import Callable

from contracts.errors import PdserveError
from contracts.requests import AttemptKey
from kv_transfer.choice import open_transports
from kv_transfer.peer import Puller
from kv_transfer.peers import Peers
from kv_transfer.receiver import Receiver
from protos.links.base import Link
from shared_state.registry import Registry
from worker.core import WorkerCore
from worker.exporting import Exporting


class HandOver:
    """See the module. `on_export_end` hears the end of each export, and with what error."""

    def __init__(
        self,
        core: WorkerCore,
        link: Link,
        registry: Registry,
        tasks: asyncio.TaskGroup,
        on_export_end: Callable[[AttemptKey, PdserveError | None], None],
    ) -> None:
        store = core.runner.store
        self._registry = registry
        self._tasks = tasks
        self._transports = open_transports(core.config, store)
        self.exporting = Exporting(core, self._transports, on_export_end)
        puller = Puller(
            link=link,
            store=store,
            transports=self._transports,
            config=core.config.transfer,
            worker_id=core.info.id,
            secret=core.config.cluster.secret,
            measured=core.figures.link_measured,
        )
        self.peers = Peers(puller, tasks, core.changed)
        self.receiver = Receiver(puller, self.peers.inlet)
        self._following: asyncio.Task[None] | None = None

    async def open(self, *, follow: bool) -> None:
        """Let pullers connect, and when this worker needs others' KV all the time (`follow`) keep links to all that
        compute prompts. Raises StartupError."""
        await self.exporting.open()
        if follow:
            self._following = self._tasks.create_task(self.peers.follow(self._registry.watch()))

    async def close(self) -> None:
        """Break every link. Idempotent."""
        if self._following is not None:
            self._following.cancel()
        await self.receiver.close()
        await self.peers.close()
        for transport in self._transports.values():
            await transport.close()

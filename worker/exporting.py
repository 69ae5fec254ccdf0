"""What a worker gives to others: its exports, with pins on its own blocks, and the streams that serve them.

Both roles own one: prompts that were just computed leave through it, and cached blocks that somebody fetches.
"""

import asyncio
from collections.abc import Callable, Sequence

from contracts.errors import PdserveError
from contracts.handover import ExporterMessage, PullerMessage
from contracts.kv import BlockHash
from contracts.requests import AttemptKey
from engine.block_manager import Holder, HolderKind
from kv_transfer.exporter import Exporter
from kv_transfer.exports import Exports
from kv_transfer.handshake import Handshake
from kv_transfer.offer import Offer
from kv_transfer.transports.base import Transport
from protos.links.base import Duplex
from worker.core import WorkerCore


class Exporting:
    """See the module. Implements Pins. `on_end` hears the end of each export, and with what error."""

    def __init__(
        self,
        core: WorkerCore,
        transports: dict[str, Transport],
        on_end: Callable[[AttemptKey, PdserveError | None], None],
    ) -> None:
        self._core = core
        self._on_end = on_end
        config, store = core.config, core.runner.store
        self.exports = Exports(
            self,
            asyncio.get_running_loop(),
            block_size=core.capacity.layout.block_size,
            config=config.transfer,
        )
        core.watch(HolderKind.EXPORT, lambda: set(self.exports.owners()))
        core.checks.append(self.exports.check)
        handshake = Handshake(core.info.incarnation, core.capacity.layout, config.cluster.secret)
        self._offer = Offer(handshake, store, transports)
        self._exporter = Exporter(
            self.exports, handshake, store, self._offer, config=config.transfer, tracing=core.tracing
        )

    async def open(self) -> None:
        """Let pullers connect. Raises StartupError."""
        await self._offer.open(self._core.config.cluster.host)

    async def serve(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        """Serve one stream of a puller until it ends."""
        await self._exporter.serve(stream)

    def pin(self, key: AttemptKey, blocks: Sequence[int]) -> None:
        """The export becomes a holder of the prompt's blocks."""
        self._core.blocks.share(Holder(HolderKind.EXPORT, key), blocks)

    def lend(self, key: AttemptKey, hashes: Sequence[BlockHash]) -> Sequence[int]:
        """The export becomes a holder of cached blocks."""
        blocks = self._core.blocks.match(hashes)
        return self._core.blocks.allocate(Holder(HolderKind.EXPORT, key), blocks, 0) if blocks else ()

    def unpin(self, key: AttemptKey, error: PdserveError | None) -> None:
        """The export has ended, however it did."""
        self._core.blocks.release(Holder(HolderKind.EXPORT, key))
        self._on_end(key, error)
        self._core.changed()

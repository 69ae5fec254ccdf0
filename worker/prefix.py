"""Fetches the part of a prompt that another worker has in its cache, before the rest is computed here.

A role calls it for a Submit that names such a worker. What comes is put into the prefix cache, where the scheduler
finds it like everything else that was computed before; what does not come costs at most the time in which it could have
been computed.
"""

import asyncio
import logging

from contracts.errors import HandoverFailed, PdserveError
from contracts.handover import Last
from contracts.kv import BlockHash
from contracts.requests import AttemptKey
from contracts.session import Source
from engine.block_manager import Holder, HolderKind, NoFreeBlocks
from engine.sequence import Sequence
from kv_transfer.orders import FetchOrder
from kv_transfer.receiver import Receiver
from worker.core import WorkerCore

_log = logging.getLogger(__name__)


class PrefixFetcher:
    """All fetches of one worker."""

    def __init__(self, core: WorkerCore, receiver: Receiver) -> None:
        self._core = core
        self._receiver = receiver
        self._fetching: set[AttemptKey] = set()
        core.watch(HolderKind.RESERVATION, lambda: self._fetching)

    async def fetch(self, sequence: Sequence, source: Source, traceparent: str, deadline: float) -> None:
        """Returns when what `source` has of the sequence's full blocks is in the cache here, or it is clear that it
        will not come. Computing the context needs its last token, so the block that ends with it is not asked for.
        Cancelling it is safe."""
        blocks = self._core.blocks
        hashes = sequence.hashes(len(sequence.tokens) - 1)
        held = blocks.match(hashes)
        missing = hashes[len(held) :]
        if not missing:
            return
        key = AttemptKey(f"{sequence.key.request_id}/prefix", sequence.key.attempt)
        holder = Holder(HolderKind.RESERVATION, key)
        try:
            table = blocks.allocate(holder, held, len(missing))
        except NoFreeBlocks:
            return
        self._fetching.add(key)
        fresh = table[len(held) :]
        worth = asyncio.get_running_loop().time() + self._worth(len(missing))
        order = FetchOrder(key, source, fresh, missing, traceparent, min(deadline, worth))
        try:
            stats = await self._receiver.receive(order, lambda last: self._keep(last, fresh, missing))
            self._core.figures.transferred(stats)
        except PdserveError as error:
            self._core.figures.transfer_failed(error)
            _log.info("the prefix of %s was not fetched from worker %s: %s", sequence.key, source.worker_id, error)
        except Exception as error:  # noqa: BLE001 - a fault of ours in one fetch must not end the others
            self._core.figures.transfer_failed(HandoverFailed(type(error).__name__))
            _log.exception("the fetch of the prefix of %s failed", sequence.key)
        finally:
            self._fetching.discard(key)
            blocks.release(holder)  # what was kept is cached, the rest is free
            self._core.changed()

    def _worth(self, blocks: int) -> float:
        """Seconds after which computing them would have been faster; before the first step nobody knows."""
        seconds = self._core.seconds_to_compute(blocks * self._core.capacity.layout.block_size)
        return self._core.config.transfer.silence_seconds if seconds is None else seconds

    def _keep(self, last: Last, fresh: list[int], hashes: list[BlockHash]) -> None:
        for block, block_hash in zip(fresh[: last.blocks], hashes[: last.blocks], strict=True):
            self._core.blocks.seal(block, block_hash)

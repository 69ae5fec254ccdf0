"""Serves one pull stream: the handshake, then frames of whole blocks while the prompt is being computed.

A process's link calls `Exporter.serve` for each Pull, each in a task of its own, so that a slow puller holds
up nobody else. It decides nothing: states, leases and refusals are those of exports.py. It must never read a
block whose export has ended.
"""

import asyncio
from collections.abc import Sequence

from contracts.config import TransferConfig
from contracts.errors import HandoverFailed
from contracts.handover import Alive, Chunk, ExporterMessage, Last, Progress, Pull, PullFailed
from contracts.handover import PullerMessage as Puller
from contracts.kv import BlockStore
from kv_transfer.exports import Exports
from kv_transfer.frames import blocks_per_frame, checksum, digest
from kv_transfer.handshake import Handshake
from kv_transfer.subscription import Subscription
from kv_transfer.transports.base import Transport
from protos.links.base import Duplex, LinkClosed
from telemetry.tracing import Attribute, Span, Tracing

_PROGRESS_SECONDS = 1.0
"""A puller hears something at least this often; it gives up after transfer.silence_seconds."""


class Exporter:
    """The sending side of every hand-over of one worker."""

    def __init__(
        self,
        exports: Exports,
        handshake: Handshake,
        store: BlockStore,
        transport: Transport,
        *,
        config: TransferConfig,
        tracing: Tracing,
    ) -> None:
        self._exports = exports
        self._handshake = handshake
        self._store = store
        self._transport = transport
        self._config = config
        self._tracing = tracing
        self._per_frame = blocks_per_frame(config.frame_bytes, store.layout.block_bytes)

    async def serve(self, stream: Duplex[ExporterMessage, Puller]) -> None:
        """One Pull, until the export or the stream ends. A stream that ends without an Ack releases the blocks
        at once: the puller has failed, or it has committed and its Ack was lost; either way it needs them no
        more. Raises LinkClosed when the stream breaks before it is served."""
        pull = await self._first(stream)
        if pull is None:
            return
        try:
            self._handshake.check(pull)
        except HandoverFailed as refused:
            await stream.send(PullFailed(refused.info()))
            return
        attributes: dict[str, Attribute] = {
            "pdserve.request": pull.key.request_id,
            "pdserve.attempt": pull.key.attempt,
            "pdserve.puller": pull.puller,
        }
        span = self._tracing.start("pdserve.kv_export", pull.traceparent, **attributes)
        subscription = self._exports.subscribe(pull)
        try:
            await self._converse(stream, subscription, span)
        finally:
            self._exports.leave(subscription)
            failed = subscription.final
            span.end(failed.error.message if isinstance(failed, PullFailed) else "")

    async def _first(self, stream: Duplex[ExporterMessage, Puller]) -> Pull | None:
        """None when what came first, or nothing within park_seconds, is not a Pull."""
        try:
            async with asyncio.timeout(self._config.park_seconds):
                message = await stream.receive()
        except TimeoutError:
            return None
        return message if isinstance(message, Pull) else None

    async def _converse(self, stream: Duplex[ExporterMessage, Puller], subscription: Subscription, span: Span) -> None:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(self._listen(stream, subscription))
            sending = tasks.create_task(self._send(stream, subscription, span))
            await subscription.over.wait()
            # a puller that does not take its last message in time will find the stream closed instead
            await asyncio.wait({sending}, timeout=self._config.silence_seconds if subscription.final else 0)
            sending.cancel()
            listening.cancel()

    async def _listen(self, stream: Duplex[ExporterMessage, Puller], subscription: Subscription) -> None:
        try:
            while isinstance(await stream.receive(), Alive):
                self._exports.renew(subscription)
        except LinkClosed:
            pass  # as when it closed in order: see serve
        self._exports.leave(subscription)

    async def _send(self, stream: Duplex[ExporterMessage, Puller], subscription: Subscription, span: Span) -> None:
        try:
            await self._send_blocks(stream, subscription, span)
            if subscription.final is not None:
                await stream.send(subscription.final)
        except LinkClosed:
            self._exports.leave(subscription)

    async def _send_blocks(
        self, stream: Duplex[ExporterMessage, Puller], subscription: Subscription, span: Span
    ) -> None:
        """Until Last is sent or the subscription is over."""
        loop = asyncio.get_running_loop()
        following = subscription.pull.first_block
        checksums: list[int] = []
        spoke = loop.time()
        while not subscription.over.is_set():
            subscription.changed.clear()
            export = subscription.export
            message: ExporterMessage
            if export is not None and export.blocks is not None and following < export.ready:
                blocks = export.blocks[following : min(following + self._per_frame, export.ready)]
                message = await self._chunk(following, blocks)
                if subscription.over.is_set():
                    return  # the blocks were let go while they were packed: what was read may be anything
                following += len(blocks)
                checksums += message.checksums
            elif export is not None and export.token is not None:
                span.set(blocks=len(checksums), bytes=len(checksums) * self._store.layout.block_bytes)
                await stream.send(Last(export.token, export.kv_tokens, export.ready, digest(checksums)))
                return
            else:
                try:
                    async with asyncio.timeout_at(spoke + _PROGRESS_SECONDS):
                        await subscription.changed.wait()
                    continue
                except TimeoutError:
                    message = self._progress(subscription)
            await stream.send(message)
            spoke = loop.time()

    async def _chunk(self, first_block: int, blocks: Sequence[int]) -> Chunk:
        checksums = tuple(checksum(self._store.read(block)) for block in blocks)
        payload = await self._transport.pack(self._store, blocks)
        return Chunk(first_block, len(blocks), checksums, payload)

    def _progress(self, subscription: Subscription) -> Progress:
        export = subscription.export
        if export is None:
            return Progress(computed=0, queued=0)
        return Progress(export.computed, self._exports.queued_before(export.key))

"""Serves one pull stream: the handshake, then frames of whole blocks while the prompt is being computed.

A process's link calls `Exporter.serve` for each stream, each in a task of its own, so that a slow puller holds
up nobody else. It decides nothing: states, leases and refusals are those of exports.py. It must never send a
block whose export has ended.
"""

import asyncio
from collections.abc import Sequence

from contracts.config import TransferConfig
from contracts.errors import HandoverFailed
from contracts.handover import Alive, Chunk, ExporterMessage, Fetch, Introduce, Last, Progress, Pull, PullFailed
from contracts.handover import PullerMessage as Puller
from contracts.kv import BlockStore
from kv_transfer.exports import Exports
from kv_transfer.frames import blocks_per_frame, digest
from kv_transfer.handshake import Handshake
from kv_transfer.offer import Offer
from kv_transfer.subscription import Subscription
from kv_transfer.transports.base import Outlet
from protos.links.base import Duplex, LinkClosed
from telemetry.tracing import Attribute, Span, Tracing

_PROGRESS_SECONDS = 1.0
"""A puller hears something at least this often while no block is on its way to it."""

_Stream = Duplex[ExporterMessage, Puller]


class Exporter:
    """The sending side of every hand-over of one worker."""

    def __init__(
        self,
        exports: Exports,
        handshake: Handshake,
        store: BlockStore,
        offer: Offer,
        *,
        config: TransferConfig,
        tracing: Tracing,
    ) -> None:
        self._exports = exports
        self._handshake = handshake
        self._store = store
        self._offer = offer
        self._config = config
        self._tracing = tracing
        self._per_frame = blocks_per_frame(config.frame_bytes, store.layout.block_bytes)

    async def serve(self, stream: _Stream) -> None:
        """One stream, until the export or the stream ends. A stream that ends without an Ack releases the blocks
        at once: the puller has failed, or it has committed and its Ack was lost; either way it needs them no
        more. Raises LinkClosed when the stream breaks before it is served."""
        try:
            async with asyncio.timeout(self._config.park_seconds):
                first = await stream.receive()
        except TimeoutError:
            return  # it says nothing: closing the stream is the answer
        match first:
            case Introduce():
                try:
                    await self._offer.set_up(stream, first, self._config.silence_seconds)
                except TimeoutError:
                    return  # as above
            case Pull() | Fetch():
                await self._hand_over(stream, first)
            case _:
                return

    async def _hand_over(self, stream: _Stream, pull: Pull | Fetch) -> None:
        try:
            self._handshake.check(pull)
            outlet = self._offer.outlet(pull.transport, pull.channel)
        except HandoverFailed as refused:
            await stream.send(PullFailed(refused.info()))
            return
        attributes: dict[str, Attribute] = {
            "pdserve.request": pull.key.request_id,
            "pdserve.attempt": pull.key.attempt,
            "pdserve.puller": pull.puller,
            "pdserve.transport": pull.transport,
        }
        span = self._tracing.start("pdserve.kv_export", pull.traceparent, **attributes)
        subscription = self._exports.subscribe(pull) if isinstance(pull, Pull) else self._exports.lend(pull)
        try:
            await self._converse(stream, subscription, outlet, span)
        finally:
            outlet.close()
            self._exports.leave(subscription)
            failed = subscription.final
            span.end(failed.error.message if isinstance(failed, PullFailed) else "")

    async def _converse(self, stream: _Stream, subscription: Subscription, outlet: Outlet, span: Span) -> None:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(self._listen(stream, subscription))
            sending = tasks.create_task(self._send(stream, subscription, outlet, span))
            await subscription.over.wait()
            # whatever it is at, its blocks are let go; a channel with half a frame in it breaks
            sending.cancel()
            await asyncio.wait({sending})
            outlet.close()
            await self._send_final(stream, subscription)
            listening.cancel()

    async def _send_final(self, stream: _Stream, subscription: Subscription) -> None:
        """A puller that does not take its last message in time will find the stream closed instead."""
        if subscription.final is None:
            return
        try:
            async with asyncio.timeout(self._config.silence_seconds):
                await stream.send(subscription.final)
        except (LinkClosed, TimeoutError):
            return

    async def _listen(self, stream: _Stream, subscription: Subscription) -> None:
        try:
            # a first message that comes twice changes nothing
            while isinstance(message := await stream.receive(), Alive | Pull | Fetch):
                if isinstance(message, Alive):
                    self._exports.renew(subscription)
        except LinkClosed:
            pass  # as when it closed in order: see serve
        self._exports.leave(subscription)

    async def _send(self, stream: _Stream, subscription: Subscription, outlet: Outlet, span: Span) -> None:
        try:
            await self._send_blocks(stream, subscription, outlet, span)
        except LinkClosed:
            self._exports.leave(subscription)

    async def _send_blocks(self, stream: _Stream, subscription: Subscription, outlet: Outlet, span: Span) -> None:
        """Until Last is sent or the subscription is over."""
        loop = asyncio.get_running_loop()
        following = subscription.first_block
        checksums: list[int] = []
        spoke = loop.time()
        while not subscription.over.is_set():
            subscription.changed.clear()
            export = subscription.export
            if export is not None and export.blocks is not None and following < export.ready:
                ready = export.blocks[following : export.ready]
                sent = await self._send_ready(stream, subscription, outlet, following, ready)
                following += len(sent)
                checksums += sent
            elif export is not None and export.complete:
                span.set(blocks=len(checksums), bytes=len(checksums) * self._store.layout.block_bytes)
                await stream.send(Last(export.token, export.kv_tokens, export.ready, digest(checksums)))
                return
            else:
                try:
                    async with asyncio.timeout_at(spoke + _PROGRESS_SECONDS):
                        await subscription.changed.wait()
                    continue
                except TimeoutError:
                    await stream.send(self._progress(subscription))
            spoke = loop.time()

    async def _send_ready(
        self, stream: _Stream, subscription: Subscription, outlet: Outlet, first: int, blocks: Sequence[int]
    ) -> list[int]:
        """Frames of these blocks, of which `first` is the number in the prompt; the checksums of what was sent. Each is
        packed while the one before it is sent."""
        frames = [blocks[at : at + self._per_frame] for at in range(0, len(blocks), self._per_frame)]
        checksums: list[int] = []
        packing = asyncio.create_task(outlet.pack(frames[0]))
        try:
            for frame, following in zip(frames, [*frames[1:], None], strict=True):
                packed = await packing
                if subscription.over.is_set():
                    break  # the blocks were let go while they were packed: what was read may be anything
                if following is not None:
                    packing = asyncio.create_task(outlet.pack(following))
                await stream.send(Chunk(first + len(checksums), len(frame), packed.checksums, packed.payload))
                await outlet.push(frame)
                checksums += packed.checksums
        finally:
            packing.cancel()
            await asyncio.wait({packing})
        return checksums

    def _progress(self, subscription: Subscription) -> Progress:
        export = subscription.export
        if export is None:
            return Progress(computed=0, queued=0)
        return Progress(export.computed, self._exports.queued_before(export.key))

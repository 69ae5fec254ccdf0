"""The prefill role: run each prompt up to its first token, export its KV while it is computed.

Called by the session server (commands from routers), by the engine loop (what each step did), and by the
exports (a receiver is done). It never waits: everything here is synchronous.
"""

import asyncio
from collections.abc import Sequence as Blocks

from contracts.errors import Cancelled, DeadlineExceeded, PdserveError
from contracts.handover import ExporterMessage, PullerMessage
from contracts.requests import AttemptKey
from contracts.session import Failed, Submit, Tokens
from contracts.workers import WorkerLoad
from engine.block_manager import Holder, HolderKind
from engine.loop import Advance, StepReport
from engine.sequence import Sequence
from kv_transfer.choice import open_transports
from kv_transfer.exporter import Exporter
from kv_transfer.exports import Exports
from kv_transfer.handshake import Handshake
from kv_transfer.offer import Offer
from protos.links.base import Duplex, Link
from shared_state.registry import Registry
from telemetry.milestones import Milestone
from worker.core import WorkerCore
from worker.legs import Leg, Legs
from worker.session_server import Emit


class PrefillRole:
    """See the module. Implements Commands, StepSink and Pins."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self.engine = core.engine(self)
        self._legs = Legs(self._expired)
        self._exports = Exports(
            self,
            asyncio.get_running_loop(),
            block_size=core.capacity.layout.block_size,
            config=core.config.transfer,
        )
        core.watch(HolderKind.EXPORT, lambda: set(self._exports.owners()))
        core.checks.append(self._exports.check)
        store = core.runner.store
        handshake = Handshake(core.info.incarnation, core.capacity.layout, core.config.cluster.secret)
        self._offer = Offer(handshake, store, open_transports(core.config, store))
        self._exporter = Exporter(
            self._exports, handshake, store, self._offer, config=core.config.transfer, tracing=core.tracing
        )

    @property
    def busy(self) -> bool:
        """Whether any attempt is in work, exports that wait for their receiver included."""
        return bool(self._legs)

    def leases(self) -> int:
        """Exports that hold blocks for a receiver."""
        return self._exports.leases()

    async def open(self) -> None:
        """Let pullers connect. Raises StartupError."""
        await self._offer.open(self._core.config.cluster.host)

    async def close(self) -> None:
        """Break every channel. Idempotent."""
        await self._offer.close()

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        """Serve one stream of a puller."""
        await self._exporter.serve(stream)

    # Commands

    def submit(self, message: Submit, emit: Emit) -> None:
        """Start the prefill of an attempt, or say at once why not."""
        key = message.key
        if key in self._legs or key in self.engine.sequences:
            return
        try:
            self._core.check(message)
            self._core.check_backlog(self.load().backlog_tokens)
            sequence = self._core.sequence(message, one_token=True)
        except PdserveError as error:
            emit(Failed(key, error.info()))
            self._exports.fail(key, error)  # a Pull that came first hears it at once
            return
        span = self._core.tracing.start("pdserve.prefill", message.traceparent, **self._core.attributes(message))
        leg = self._legs.open(message, emit, span)
        if self._exports.open(key, message.ticket, leg.deadline):
            self.engine.add(sequence)
        else:
            self._legs.close(key, "the attempt had ended before it was submitted")

    def cancel(self, key: AttemptKey, reason: str) -> None:
        """Stop an attempt: waiting, computing, or computed and waiting for its receiver."""
        leg = self._legs.get(key)
        if leg is not None:
            self._end(leg, Cancelled(reason), tell=False)
        else:
            self._exports.cancel(key, reason)

    def cancel_session(self, emit: Emit, reason: str) -> None:
        """The router of these attempts is gone."""
        for leg in [leg for leg in self._legs if leg.emit == emit]:
            self.cancel(leg.key, reason)

    def load(self) -> WorkerLoad:
        """What is free for new prompts."""
        return self._core.load(
            backlog_tokens=self._core.scheduler.backlog_tokens + self._exports.pinned_tokens(),
            free_slots=self._core.capacity.slots,
            linked=True,
        )

    # StepSink

    def admitted(self, sequence: Sequence) -> None:
        """All blocks of the prompt exist: from here on the export holds them too."""
        leg = self._legs.get(sequence.key)
        if leg is not None:
            leg.span.event(Milestone.PREFILL_STARTED.value, cached_tokens=sequence.cached_tokens)
            self._core.figures.admitted(sequence)
            self._exports.attach(sequence.key, [int(block) for block in sequence.block_table])

    def delivered(self, advances: list[Advance]) -> None:
        """Blocks that a step has filled may leave; first tokens go to their routers."""
        for advance in advances:
            sequence, token = advance.sequence, advance.token
            leg = self._legs.get(sequence.key)
            if leg is None:
                continue
            leg.span.event("chunk", start=advance.start, tokens=advance.computed)
            self._core.figures.advanced(advance)
            self._exports.publish(sequence.key, sequence.computed)
            if token is not None:
                leg.span.event(Milestone.FIRST_TOKEN.value)
                leg.emit(Tokens(sequence.key, (token,), sequence.cached_tokens))
                if token.finish is not None:
                    self._core.figures.finished(token.finish)
                    self._legs.close(sequence.key)
                self._exports.finish(sequence.key, token, sequence.computed)

    def failed(self, sequence: Sequence, error: PdserveError) -> None:
        """The engine gave the prompt up; the receiver hears it in band, the router by its session."""
        leg = self._legs.get(sequence.key)
        if leg is not None:
            self._end(leg, error)

    def stepped(self, report: StepReport) -> None:
        """Figures of a step."""
        self._core.stepped(report)

    # Pins

    def pin(self, key: AttemptKey, blocks: Blocks[int]) -> None:
        """The export becomes a holder of the prompt's blocks."""
        self._core.blocks.share(Holder(HolderKind.EXPORT, key), blocks)

    def unpin(self, key: AttemptKey, error: PdserveError | None) -> None:
        """The export has ended, however it did: the attempt is over here, also when its prompt is not done."""
        self._core.blocks.release(Holder(HolderKind.EXPORT, key))
        if key in self._legs:
            self._legs.close(key, error.message if error is not None else "")
            if error is not None:
                self._core.figures.ended(error)
            else:
                self._core.figures.handed_over()
        self.engine.cancel(key, self._core.stopped)
        self._core.changed()

    # Ends

    def _expired(self, key: AttemptKey) -> None:
        leg = self._legs.get(key)
        if leg is not None:
            self._end(leg, DeadlineExceeded("the request's deadline passed during its prefill"))

    def _end(self, leg: Leg, error: PdserveError, *, tell: bool = True) -> None:
        """The attempt ends early, in whatever state it is. Its blocks come back when no step writes to them."""
        if tell:
            leg.emit(Failed(leg.key, error.info()))
        self._core.figures.ended(error)
        self._legs.close(leg.key, error.message)
        self.engine.cancel(leg.key, self._core.stopped)
        self._exports.fail(leg.key, error)
        self._core.changed()


def create(core: WorkerCore, link: Link, registry: Registry, tasks: asyncio.TaskGroup) -> PrefillRole:
    """The role, for worker/host.py. It opens no stream, looks for nobody and has no task of its own."""
    return PrefillRole(core)

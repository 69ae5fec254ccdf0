"""The prefill role: run each prompt up to its first token, export its KV while it is computed.

Called by the session server (commands from routers), by the engine loop (what each step did), and by the
exports (a receiver is done). It never waits: everything here is synchronous; only the fetch of a prefix that another
worker has runs in a task of its own.
"""

import asyncio

from contracts.errors import Cancelled, DeadlineExceeded, PdserveError, WorkerLost
from contracts.handover import ExporterMessage, PullerMessage
from contracts.requests import AttemptKey
from contracts.session import Failed, Source, Submit, Tokens
from contracts.workers import WorkerLoad
from engine.loop import Advance, StepReport
from engine.sequence import Sequence
from protos.links.base import Duplex, Link
from shared_state.registry import Registry
from telemetry.milestones import Milestone
from worker.core import WorkerCore
from worker.hand_over import HandOver
from worker.legs import Leg, Legs
from worker.prefix import PrefixFetcher
from worker.session_server import Emit


class PrefillRole:
    """See the module. Implements Commands and StepSink."""

    def __init__(self, core: WorkerCore, link: Link, registry: Registry, tasks: asyncio.TaskGroup) -> None:
        self._core = core
        self.engine = core.engine(self)
        self._legs = Legs(self._expired)
        self._hand_over = HandOver(core, link, registry, tasks, self._export_ended)
        self._exports = self._hand_over.exporting.exports
        self._prefixes = PrefixFetcher(core, self._hand_over.receiver)
        self._fetching: dict[AttemptKey, asyncio.Task[None]] = {}
        self._tasks = tasks

    @property
    def busy(self) -> bool:
        """Whether any attempt is in work, exports that wait for their receiver included."""
        return bool(self._legs) or bool(self._fetching)

    def leases(self) -> int:
        """Exports that hold blocks for a receiver."""
        return self._exports.leases()

    async def open(self) -> None:
        """Let pullers connect. Raises StartupError."""
        await self._hand_over.open(follow=False)

    async def close(self) -> None:
        """Break every link. Idempotent."""
        await self._hand_over.close()

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        """Serve one stream of a puller."""
        await self._hand_over.exporting.serve(stream)

    # Commands

    def submit(self, message: Submit, emit: Emit) -> None:
        """Start the prefill of an attempt, or say at once why not."""
        key = message.key
        if key in self._legs or key in self._fetching or key in self.engine.sequences:
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
        if not self._exports.open(key, message.ticket, leg.deadline):
            self._legs.close(key, "the attempt had ended before it was submitted")
        elif message.prefix is not None:
            self._fetch_first(leg, sequence, message.prefix)
        else:
            self.engine.add(sequence)

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
            self._end(leg, WorkerLost(reason), tell=False)  # not Cancelled: the request may go on elsewhere

    def load(self) -> WorkerLoad:
        """What is free for new prompts."""
        return self._core.load(
            backlog_tokens=self._core.scheduler.backlog_tokens + self._exports.pinned_tokens() + self._fetching_tokens,
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

    # The hand-over

    @property
    def _fetching_tokens(self) -> int:
        submits = [leg.submit for leg in self._legs if leg.key in self._fetching]
        return sum(len(submit.prompt_ids) + len(submit.relayed) for submit in submits)

    def _fetch_first(self, leg: Leg, sequence: Sequence, source: Source) -> None:
        """Ask another worker for what it has of the prompt; then compute what is missing."""
        fetching = self._prefixes.fetch(sequence, source, leg.span.traceparent, leg.deadline)
        task = self._fetching[leg.key] = self._tasks.create_task(fetching)
        task.add_done_callback(lambda _: self._fetched(sequence))

    def _fetched(self, sequence: Sequence) -> None:
        del self._fetching[sequence.key]
        if sequence.key in self._legs:
            self.engine.add(sequence)
        self._core.changed()

    def _export_ended(self, key: AttemptKey, error: PdserveError | None) -> None:
        """The attempt is over here, also when its prompt is not done."""
        if key in self._legs:
            self._legs.close(key, error.message if error is not None else "")
            if error is not None:
                self._core.figures.ended(error)
            else:
                self._core.figures.handed_over()
        self.engine.cancel(key, self._core.stopped)

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
        if leg.key in self._fetching:
            self._fetching[leg.key].cancel()
        computing = self.engine.cancel(leg.key, self._core.stopped)
        self._exports.fail(leg.key, error)
        if not computing:
            self._core.stopped(0)
        self._core.changed()


def create(core: WorkerCore, link: Link, registry: Registry, tasks: asyncio.TaskGroup) -> PrefillRole:
    """The role, for worker/host.py."""
    return PrefillRole(core, link, registry, tasks)

"""The decode role: reserve, receive, join the continuous batch, detokenise, stop, stream.

Without a source it computes the prompt itself: that is an aggregated worker. Called by the session server
(commands from routers) and by the engine loop (what each step did); only `_receive` waits, in a task of
its own per hand-over.
"""

import asyncio
import contextlib

from contracts.errors import Cancelled, DeadlineExceeded, PdserveError, PullNotFound, Refused
from contracts.handover import ExporterMessage, Last, PullerMessage, PullFailed
from contracts.requests import AttemptKey
from contracts.seams import load_plug
from contracts.session import Failed, Reserved, Source, Submit, Tokens
from contracts.workers import WorkerLoad
from decode_workers.reservations import Reservation, Reservations
from engine.block_manager import HolderKind
from engine.loop import Advance, StepReport
from engine.sequence import Sequence
from kv_transfer.receiver import ReceiveOrder, Receiver
from protos.links.base import Duplex, Link, LinkClosed
from telemetry.milestones import Milestone
from worker.core import WorkerCore
from worker.legs import Leg, Legs
from worker.session_server import Emit


class DecodeRole:
    """See the module. Implements Commands and StepSink."""

    def __init__(
        self, core: WorkerCore, reservations: Reservations, receiver: Receiver, tasks: asyncio.TaskGroup
    ) -> None:
        self._core = core
        self._reservations = reservations
        self._receiver = receiver
        self._tasks = tasks
        self.engine = core.engine(self)
        self._legs = Legs(self._expired)
        self._receiving: dict[AttemptKey, asyncio.Task[None]] = {}

    @property
    def busy(self) -> bool:
        """Whether any attempt is in work or gives its room back."""
        return bool(self._legs) or bool(self._receiving)

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        """A decode worker exports nothing."""
        with contextlib.suppress(LinkClosed):
            if await stream.receive() is not None:
                await stream.send(PullFailed(PullNotFound("a decode worker has no exports").info()))

    # Commands

    def submit(self, message: Submit, emit: Emit) -> None:
        """Hold room for an attempt and fetch its KV, or say at once why not."""
        key = message.key
        if key in self._legs:
            return
        try:
            self._core.check(message)
            self._check_preempted()
        except PdserveError as error:
            emit(Failed(key, error.info()))
            return
        span = self._core.tracing.start("pdserve.decode", message.traceparent, **self._core.attributes(message))
        leg = self._legs.open(message, emit, span)
        sequence = self._core.sequence(leg, one_token=False)
        try:
            reservation = self._reserve(leg, sequence)
        except PdserveError as error:
            self._fail(leg, error)
            return
        leg.span.event(Milestone.RESERVED.value, blocks=len(reservation.blocks), matched=reservation.matched)
        emit(Reserved(key))
        if message.source is None:
            self._compute_here(reservation, sequence)
        else:
            task = self._tasks.create_task(self._receive(leg, reservation, sequence, message.source))
            self._receiving[key] = task
            # not a `finally` in the task: one that is cancelled before it starts never runs
            task.add_done_callback(lambda _: self._received(leg))

    def cancel(self, key: AttemptKey, reason: str) -> None:
        """Stop an attempt: while its KV arrives, or while it decodes."""
        leg = self._legs.get(key)
        if leg is not None:
            self._stop(leg)
            self._core.figures.failed(Cancelled(reason))
            self._legs.close(key, reason)

    def cancel_session(self, emit: Emit, reason: str) -> None:
        """The router of these attempts is gone."""
        for leg in [leg for leg in self._legs if leg.emit == emit]:
            self.cancel(leg.key, reason)

    def load(self) -> WorkerLoad:
        """What a new reservation could take."""
        return self._core.load(
            backlog_tokens=self._core.scheduler.backlog_tokens,
            free_slots=self._reservations.free_slots(len(self.engine.sequences)),
        )

    # StepSink

    def admitted(self, sequence: Sequence) -> None:
        """A preempted sequence has blocks again."""
        leg = self._legs.get(sequence.key)
        if leg is not None:
            leg.span.event("resumed", preemptions=sequence.preemptions)

    def delivered(self, advances: list[Advance]) -> None:
        """New tokens go to their routers, all in the frame of this step."""
        for advance in advances:
            leg = self._legs.get(advance.sequence.key)
            if leg is None:
                continue
            self._core.figures.advanced(advance)
            token = advance.token
            if token is not None:
                leg.emit(Tokens(leg.key, (token,), advance.sequence.cached_tokens))
                if token.finish is not None:
                    leg.span.event(Milestone.FINISHED.value, reason=token.finish.value, tokens=token.position)
                    self._core.figures.finished(token.finish)
                    self._legs.close(leg.key)

    def failed(self, sequence: Sequence, error: PdserveError) -> None:
        """The engine gave the sequence up."""
        leg = self._legs.get(sequence.key)
        if leg is not None:
            self._fail(leg, error)

    def stepped(self, report: StepReport) -> None:
        """Figures of a step."""
        self._core.stepped(report)

    # The hand-over

    def _check_preempted(self) -> None:
        """A preempted sequence gets free blocks before any new reservation."""
        if any(sequence.preemptions for sequence in self._core.scheduler.waiting):
            raise Refused("a preempted sequence waits for blocks")

    def _reserve(self, leg: Leg, sequence: Sequence) -> Reservation:
        context = len(sequence.tokens)
        left = leg.submit.sampling.max_tokens - len(leg.submit.relayed)
        growth = min(left, self._core.config.kv.growth_tokens)
        # the last token drawn needs no KV; computing here needs the logits of the context's last token
        known = context if leg.submit.source is not None else context - 1
        return self._reservations.reserve(
            leg.key, context + growth - 1, sequence.hashes(known), sequences=len(self.engine.sequences)
        )

    def _compute_here(self, reservation: Reservation, sequence: Sequence) -> None:
        matched = reservation.matched * self._core.capacity.layout.block_size
        sequence.append_blocks(self._reservations.commit(reservation.key))
        sequence.computed = sequence.cached_tokens = matched
        self._core.figures.admitted(sequence)
        self.engine.join(sequence)

    async def _receive(self, leg: Leg, reservation: Reservation, sequence: Sequence, source: Source) -> None:
        """One hand-over, from Pull to Ack; ends with the sequence in the engine or the room given back."""
        context = len(sequence.tokens)
        block_size = self._core.capacity.layout.block_size
        order = ReceiveOrder(
            key=leg.key,
            ticket=leg.submit.ticket,
            source=source,
            blocks=reservation.blocks[: -(-context // block_size)],
            first_block=reservation.matched,
            kv_tokens=context,
            traceparent=leg.submit.traceparent,
            deadline=leg.deadline,
        )
        span = self._core.tracing.start("pdserve.kv_transfer", leg.span.traceparent)
        outcome = "cancelled"
        try:
            stats = await self._receiver.receive(order, lambda last: self._commit(leg, sequence, last))
            self._core.figures.transferred(stats)
            span.set(bytes=stats.bytes, blocks=stats.blocks, seconds=stats.seconds)
            outcome = ""
        except PdserveError as error:
            outcome = error.message
            self._core.figures.transfer_failed(error)
            if leg.key in self._legs:
                self._fail(leg, error)
        finally:
            span.end(outcome)

    def _received(self, leg: Leg) -> None:
        """A hand-over has ended, and with it every write: what was not committed is given back."""
        del self._receiving[leg.key]
        if leg.key in self._reservations:
            self._reservations.release(leg.key)
            self._legs.close(leg.key)  # the prefill worker's token was the last one
            self._core.released()

    def _commit(self, leg: Leg, sequence: Sequence, last: Last) -> None:
        """Everything has arrived and was verified: the sequence joins the batch. Its first frame repeats the
        token that the prefill worker drew."""
        sequence.append_blocks(self._reservations.commit(leg.key))
        sequence.computed = sequence.handed_over = last.kv_tokens
        for block, block_hash in sequence.newly_full():
            self._core.blocks.seal(block, block_hash)
        token = sequence.append(last.token.token_id, last.token.logprobs)
        leg.span.event(Milestone.KV_READY.value)
        leg.emit(Tokens(leg.key, (token,)))
        self.engine.join(sequence)

    # Ends

    def _expired(self, key: AttemptKey) -> None:
        leg = self._legs.get(key)
        if leg is not None:
            self._stop(leg)
            self._fail(leg, DeadlineExceeded("the request's deadline passed"))

    def _fail(self, leg: Leg, error: PdserveError) -> None:
        """Tell the router why the attempt ends here."""
        leg.emit(Failed(leg.key, error.info()))
        self._core.figures.failed(error)
        self._legs.close(leg.key, error.message)

    def _stop(self, leg: Leg) -> None:
        """End what goes on: a hand-over gives its room back when its last write has ended, the engine when no
        step writes any more."""
        receiving = self._receiving.get(leg.key)
        if receiving is not None:
            receiving.cancel(Cancelled.code)
        self.engine.cancel(leg.key, self._core.cancelled)


def create(core: WorkerCore, link: Link, tasks: asyncio.TaskGroup) -> DecodeRole:
    """The role with its parts, for worker/host.py."""
    layout = core.capacity.layout
    reservations = Reservations(core.blocks, block_size=layout.block_size, slots=core.capacity.slots)
    core.watch(HolderKind.RESERVATION, reservations.keys)
    transfer = core.config.transfer
    receiver = Receiver(
        link,
        core.runner.store,
        load_plug("transport", transfer.transport).create(),
        transfer,
        worker_id=core.info.id,
        secret=core.config.cluster.secret,
    )
    return DecodeRole(core, reservations, receiver, tasks)

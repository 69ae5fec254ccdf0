"""The decode role: reserve, receive, join the continuous batch, detokenise, stop, stream.

Without a source it computes the prompt itself: that is an aggregated worker. Called by the session server
(commands from routers) and by the engine loop (what each step did); only `_receive` waits, in a task of
its own per hand-over.
"""

import asyncio
import logging

from contracts.errors import Cancelled, DeadlineExceeded, HandoverFailed, PdserveError, Refused
from contracts.handover import ExporterMessage, Last, PullerMessage
from contracts.requests import AttemptKey
from contracts.session import Failed, Reserved, Source, Submit, Tokens
from contracts.workers import WorkerLoad
from decode_workers.reservations import Reservation, Reservations
from engine.block_manager import HolderKind
from engine.loop import Advance, StepReport
from engine.sequence import Sequence
from kv_transfer.orders import ReceiveOrder
from protos.links.base import Duplex, Link
from shared_state.registry import Registry
from telemetry.milestones import Milestone
from worker.core import WorkerCore
from worker.hand_over import HandOver
from worker.legs import Leg, Legs
from worker.session_server import Emit

_log = logging.getLogger(__name__)


class DecodeRole:
    """See the module. Implements Commands and StepSink."""

    def __init__(
        self,
        core: WorkerCore,
        reservations: Reservations,
        link: Link,
        registry: Registry,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._core = core
        self._reservations = reservations
        self._tasks = tasks
        self.engine = core.engine(self)
        self._legs = Legs(self._expired)
        self._hand_over = HandOver(core, link, registry, tasks, _lent)
        self._receiving: dict[AttemptKey, asyncio.Task[None]] = {}
        self._left_at: dict[AttemptKey, int] = {}  # steps begun when an attempt left whose receiver has not ended
        self._pulls = core.config.cluster.mode == "disaggregated"  # prompts are computed elsewhere

    @property
    def busy(self) -> bool:
        """Whether any attempt is in work or gives its room back."""
        return bool(self._legs) or bool(self._receiving)

    def leases(self) -> int:
        """Exports of cached blocks."""
        return self._hand_over.exporting.exports.leases()

    async def open(self) -> None:
        """Link to the prefill workers that there are and will be. Raises StartupError."""
        await self._hand_over.open(follow=self._pulls)

    async def close(self) -> None:
        """Break every link. Idempotent."""
        await self._hand_over.close()

    async def pull(self, stream: Duplex[ExporterMessage, PullerMessage]) -> None:
        """Serve one stream of a puller: cached blocks can be fetched here."""
        await self._hand_over.exporting.serve(stream)

    # Commands

    def submit(self, message: Submit, emit: Emit) -> None:
        """Hold room for an attempt and fetch its KV, or say at once why not."""
        key = message.key
        if key in self._legs or key in self._receiving or key in self.engine.sequences:
            return
        try:
            self._core.check(message)
            sequence = self._core.sequence(message, one_token=False, reserve_tokens=self._reserve_tokens(message))
            reservation = self._reserve(message, sequence)
        except PdserveError as error:
            emit(Failed(key, error.info()))
            return
        span = self._core.tracing.start("pdserve.decode", message.traceparent, **self._core.attributes(message))
        leg = self._legs.open(message, emit, span)
        leg.span.event(Milestone.RESERVED.value, blocks=len(reservation.blocks), matched=reservation.matched)
        emit(Reserved(key))
        if message.source is None:
            self._compute_here(reservation, sequence)
        else:
            task = self._tasks.create_task(self._receive(leg, reservation, sequence, message.source))
            self._receiving[key] = task
            # not a `finally` in the task: one that is cancelled before it starts never runs
            task.add_done_callback(lambda _: self._received(key))

    def cancel(self, key: AttemptKey, reason: str) -> None:
        """Stop an attempt: while its KV arrives, or while it decodes."""
        leg = self._legs.get(key)
        if leg is not None:
            self._end(leg, Cancelled(reason), tell=False)

    def cancel_session(self, emit: Emit, reason: str) -> None:
        """The router of these attempts is gone."""
        for leg in [leg for leg in self._legs if leg.emit == emit]:
            self.cancel(leg.key, reason)

    def load(self) -> WorkerLoad:
        """What a new reservation could take."""
        return self._core.load(
            backlog_tokens=self._core.scheduler.backlog_tokens,
            free_slots=self._reservations.free_slots(len(self.engine.sequences)),
            linked=not self._pulls or self._hand_over.peers.linked,
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
            self._end(leg, error)

    def stepped(self, report: StepReport) -> None:
        """Figures of a step."""
        self._core.stepped(report)

    # The hand-over

    def _reserve_tokens(self, message: Submit) -> int:
        """What the attempt needs from the start: its context and some growth. The last token drawn needs no KV."""
        left = message.sampling.max_tokens - len(message.relayed)
        growth = min(left, self._core.config.kv.growth_tokens)
        return len(message.prompt_ids) + len(message.relayed) + growth - 1

    def _reserve(self, message: Submit, sequence: Sequence) -> Reservation:
        """Raises Refused."""
        if self._core.scheduler.preempted_waiting:
            raise Refused("a preempted sequence waits for blocks, it comes first")
        context = len(sequence.tokens)
        # computing the context here needs the logits of its last token
        known = context if message.source is not None else context - 1
        return self._reservations.reserve(
            message.key, sequence.reserve_tokens, sequence.hashes(known), sequences=len(self.engine.sequences)
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
            stats = await self._hand_over.receiver.receive(order, lambda last: self._commit(leg, sequence, last))
            self._core.figures.transferred(stats)
            span.set(bytes=stats.bytes, blocks=stats.blocks, seconds=stats.seconds)
            outcome = ""
        except PdserveError as error:
            outcome = error.message
            self._transfer_failed(leg, error)
        except Exception as error:  # noqa: BLE001 - a fault of ours in one hand-over must not end the others
            _log.exception("the hand-over of %s failed", leg.key)
            outcome = type(error).__name__
            self._transfer_failed(leg, HandoverFailed(f"the hand-over failed: {type(error).__name__}"))
        finally:
            span.end(outcome)

    def _transfer_failed(self, leg: Leg, error: PdserveError) -> None:
        self._core.figures.transfer_failed(error)
        if leg.key in self._legs:
            self._end(leg, error)

    def _received(self, key: AttemptKey) -> None:
        """A hand-over has ended, and with it every write: what was not committed is given back."""
        del self._receiving[key]
        if key in self._reservations:
            self._reservations.release(key)
            left_at = self._left_at.pop(key, None)
            if left_at is not None:
                self._core.stopped(self.engine.steps - left_at)
            self._legs.close(key)  # still open only if the prefill worker's token was the last one
        self._core.changed()

    def _commit(self, leg: Leg, sequence: Sequence, last: Last) -> None:
        """Everything has arrived and was verified: the sequence joins the batch. Its first frame repeats the
        token that the prefill worker drew. Raises HandoverFailed, with nothing changed, when that token is not
        the next one here."""
        if last.token is None:
            raise HandoverFailed("the prefill worker said no token")
        token = sequence.append(last.token.token_id, last.token.logprobs)
        if token != last.token:
            raise HandoverFailed(f"the prefill worker's token is {last.token}, here it is {token}")
        sequence.append_blocks(self._reservations.commit(leg.key))
        sequence.computed = sequence.handed_over = last.kv_tokens
        for block, block_hash in sequence.newly_full():
            self._core.blocks.seal(block, block_hash)
        leg.span.event(Milestone.KV_READY.value)
        leg.emit(Tokens(leg.key, (token,)))
        self.engine.join(sequence)

    # Ends

    def _expired(self, key: AttemptKey) -> None:
        leg = self._legs.get(key)
        if leg is not None:
            self._end(leg, DeadlineExceeded("the request's deadline passed"))

    def _end(self, leg: Leg, error: PdserveError, *, tell: bool = True) -> None:
        """The attempt ends early, in whatever state it is: a hand-over gives its room back when its last write
        has ended, the engine when no step writes any more."""
        if tell:
            leg.emit(Failed(leg.key, error.info()))
        self._core.figures.ended(error)
        self._legs.close(leg.key, error.message)
        if leg.key in self._reservations:
            self._reservations.leave(leg.key)
            self._left_at[leg.key] = self.engine.steps
        receiving = self._receiving.get(leg.key)
        if receiving is not None and receiving is not asyncio.current_task():
            receiving.cancel()
        self.engine.cancel(leg.key, self._core.stopped)
        self._core.changed()


def _lent(key: AttemptKey, error: PdserveError | None) -> None:
    """Cached blocks that were lent are back: no attempt of ours depends on them."""


def create(core: WorkerCore, link: Link, registry: Registry, tasks: asyncio.TaskGroup) -> DecodeRole:
    """The role with its parts, for worker/host.py."""
    reservations = Reservations(core.blocks, block_size=core.capacity.layout.block_size, slots=core.capacity.slots)
    core.watch(HolderKind.RESERVATION, reservations.keys)
    return DecodeRole(core, reservations, link, registry, tasks)

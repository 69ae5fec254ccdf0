"""What the two roles share: identity, capacity, the engine's parts, checks, figures and the audit.

A role owns a WorkerCore and asks it; the core never calls a role. worker/host.py runs both.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from contracts.config import Config
from contracts.errors import ContextLengthExceeded, InvalidRequest, KvCapacityExceeded, Refused, Stale
from contracts.kv import BlockHasher, blocks_for
from contracts.requests import AttemptKey
from contracts.session import Submit
from contracts.workers import Role, WorkerCapacity, WorkerInfo, WorkerLoad, WorkerState
from engine.block_manager import AuditFailed, BlockManager, HolderKind
from engine.loop import EngineLoop, StepReport, StepSink
from engine.output import OutputProcessor
from engine.runners.base import Runner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from telemetry.metrics import WorkerMetrics
from telemetry.tracing import Attribute, Tracing
from text.tokenizer import Tokenizer
from worker.figures import Figures
from worker.legs import Leg

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a worker knows of text: how tokens become bytes, and which end a request."""

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    max_context: int


class WorkerCore:
    """One worker's parts, made once at start."""

    def __init__(
        self, config: Config, info: WorkerInfo, runner: Runner, vocabulary: Vocabulary, tracing: Tracing
    ) -> None:
        layout = runner.store.layout
        self.config = config
        self.info = info
        self.runner = runner
        self.tracing = tracing
        self.figures = Figures(WorkerMetrics(info.role.value, info.id), config.transfer.transport)
        self.blocks = BlockManager(runner.store.blocks)
        self.scheduler = Scheduler(
            self.blocks,
            block_size=layout.block_size,
            step_tokens=config.engine.step_tokens,
            max_running=config.engine.max_running,
        )
        self.capacity = WorkerCapacity(
            blocks=runner.store.blocks,
            slots=config.engine.max_running,
            backlog_tokens=config.prefill.backlog_tokens or 2 * config.engine.step_tokens,
            max_context=vocabulary.max_context,
            layout=layout,
        )
        self.load_changed: Callable[[], None] = _nobody
        self._vocabulary = vocabulary
        self._hasher = BlockHasher(config.cluster.hash_key.encode(), layout.block_size, layout.model)
        self._engine: EngineLoop | None = None
        self._owners: list[tuple[HolderKind, Callable[[], set[AttemptKey]]]] = []

    def engine(self, sink: StepSink) -> EngineLoop:
        """The engine of this worker; a role asks for it once."""
        assert self._engine is None
        self._engine = EngineLoop(self.runner, self.scheduler, self.blocks, sink)
        engine = self._engine
        self.watch(HolderKind.SEQUENCE, lambda: {s.key for s in engine.sequences.values() if len(s.block_table)})
        return engine

    def watch(self, kind: HolderKind, owners: Callable[[], set[AttemptKey]]) -> None:
        """The audit compares the holders of this kind with what their owner says."""
        self._owners.append((kind, owners))

    def drain(self) -> None:
        """Take no new attempts; those in work go on."""
        self.info = replace(self.info, state=WorkerState.DRAINING)

    def check(self, message: Submit) -> None:
        """Raises what makes this Submit impossible here, for now (Refused, Stale) or for ever."""
        if message.incarnation != self.info.incarnation:
            raise Stale(f"incarnation: {self.info.incarnation} here, {message.incarnation} asked for")
        if self.info.state is WorkerState.DRAINING:
            raise Refused(f"worker {self.info.id} is draining")
        context = len(message.prompt_ids) + len(message.relayed)
        if context == 0 or message.sampling.max_tokens <= len(message.relayed):
            raise InvalidRequest("there is nothing to compute from, or nothing left to generate")
        outside = [i for i in (*message.prompt_ids, *message.relayed) if not 0 <= i < self.runner.vocab_size]
        if outside:
            raise InvalidRequest(f"token id {outside[0]} is outside the vocabulary", param="prompt")
        if context >= self.capacity.max_context:
            raise ContextLengthExceeded(f"{context} tokens do not fit a context of {self.capacity.max_context}")
        if self.blocks_needed(message) > self.capacity.blocks:
            raise KvCapacityExceeded(f"the request needs more than the {self.capacity.blocks} KV blocks of a worker")

    def check_backlog(self, tokens: int) -> None:
        """Raises Refused when this worker has enough prompt tokens queued. An idle one takes any prompt."""
        if tokens >= self.capacity.backlog_tokens:
            raise Refused(f"{tokens} prompt tokens are queued, the limit is {self.capacity.backlog_tokens}")

    def blocks_needed(self, message: Submit) -> int:
        """Blocks that the request holds at its end on this worker (the last token's KV is never needed)."""
        tokens = len(message.prompt_ids) + len(message.relayed)
        if self.info.role is Role.DECODE:
            tokens = len(message.prompt_ids) + message.sampling.max_tokens - 1
        return blocks_for(tokens, self.capacity.layout.block_size)

    def sequence(self, leg: Leg, *, one_token: bool) -> Sequence:
        """The leg's sequence, with what was relayed before replayed."""
        submit = leg.submit
        output = OutputProcessor(self._vocabulary.tokenizer, self._vocabulary.eos_ids, submit.sampling)
        output.replay(submit.relayed)
        return Sequence(
            leg.key,
            leg.context,
            submit.sampling,
            output,
            hasher=self._hasher,
            salt=submit.cache_salt,
            block_size=self.capacity.layout.block_size,
            one_token=one_token,
        )

    def attributes(self, message: Submit) -> Mapping[str, Attribute]:
        """What every span of a worker says."""
        return {
            "pdserve.request": message.key.request_id,
            "pdserve.attempt": message.key.attempt,
            "pdserve.worker": self.info.id,
            "pdserve.prompt_tokens": len(message.prompt_ids) + len(message.relayed),
        }

    def load(self, *, backlog_tokens: int, free_slots: int) -> WorkerLoad:
        """The load as routers see it. While a preempted sequence waits, its blocks are not for others."""
        preempted = any(sequence.preemptions for sequence in self.scheduler.waiting)
        return WorkerLoad(
            free_blocks=0 if preempted else self.blocks.available,
            free_slots=free_slots,
            backlog_tokens=backlog_tokens,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            stuck=self.stuck,
        )

    @property
    def stuck(self) -> bool:
        """Whether the engine holds work and has made no step for limits.stuck_seconds."""
        engine = self._engine
        return engine is not None and engine.idle_seconds > self.config.limits.stuck_seconds

    def leases(self) -> int:
        """Exports that hold blocks."""
        return sum(holder.kind is HolderKind.EXPORT for holder in self.blocks.holders())

    def cancelled(self, steps: int) -> None:
        """A cancelled sequence has given its blocks back, so many steps after its cancel."""
        self.figures.cancelled(steps)
        self.released()

    def released(self) -> None:
        """Blocks or slots have become free: the engine and the routers may have use for them."""
        if self._engine is not None:
            self._engine.wake()
        self.load_changed()

    def stepped(self, report: StepReport) -> None:
        """Count a step; audit when nothing is left to do."""
        self.figures.stepped(report)
        if self._engine is not None and not self._engine.busy:
            self.audit()
        self.load_changed()

    def audit(self) -> bool:
        """Recount every block and its holders; a failure is counted and logged, never raised into serving."""
        try:
            self.check_blocks()
        except AuditFailed as fault:
            self.figures.audit_failed()
            _log.error("audit of worker %s failed: %s", self.info.id, fault)
            return False
        return True

    def check_blocks(self) -> None:
        """The audit itself. Raises AuditFailed."""
        self.blocks.check()
        holders = self.blocks.holders()
        for kind, owners in self._owners:
            held = {holder.key for holder in holders if holder.kind is kind}
            if held != owners():
                raise AuditFailed(f"blocks are {kind.value} by {held}, their owners know of {owners()}")


def _nobody() -> None:
    """Before the sessions exist there is nobody to tell."""

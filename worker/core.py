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
        self.figures = Figures(WorkerMetrics())
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
            backlog_tokens=config.prefill.backlog_tokens or 4 * config.engine.step_tokens,
            max_context=vocabulary.max_context,
            layout=layout,
        )
        self.on_change: Callable[[], None] = _nobody
        self.checks: list[Callable[[], None]] = []  # further books that the audit asks to check themselves
        self._vocabulary = vocabulary
        self._hasher = BlockHasher(config.cluster.hash_key.encode(), layout.block_size, layout.model)
        self._engine: EngineLoop | None = None
        self._owners: list[tuple[HolderKind, Callable[[], set[AttemptKey]]]] = []
        self._computed_tokens = 0
        self._computing_seconds = 0.0

    def engine(self, sink: StepSink) -> EngineLoop:
        """The engine of this worker; a role asks for it once."""
        assert self._engine is None
        self._engine = EngineLoop(self.runner, self.scheduler, self.blocks, sink)
        engine = self._engine
        self.watch(HolderKind.SEQUENCE, lambda: {s.key for s in engine.sequences.values() if len(s.block_table)})
        return engine

    def watch(self, kind: HolderKind, owners: Callable[[], set[AttemptKey]]) -> None:
        """The audit compares the holders of this kind with what their owners say."""
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
        most = len(message.prompt_ids) + message.sampling.max_tokens
        if context == 0 or message.sampling.max_tokens <= len(message.relayed):
            raise InvalidRequest("there is nothing to compute from, or nothing left to generate")
        outside = [i for i in (*message.prompt_ids, *message.relayed) if not 0 <= i < self.runner.vocab_size]
        if outside:
            raise InvalidRequest(f"token id {outside[0]} is outside the vocabulary", param="prompt")
        if most > self.capacity.max_context:
            raise ContextLengthExceeded(f"{most} tokens do not fit a context of {self.capacity.max_context}")
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

    def sequence(self, submit: Submit, *, one_token: bool, reserve_tokens: int = 0) -> Sequence:
        """The attempt's sequence, with what was relayed before replayed."""
        output = OutputProcessor(self._vocabulary.tokenizer, self._vocabulary.eos_ids, submit.sampling)
        output.replay(submit.relayed)
        return Sequence(
            submit.key,
            submit.prompt_ids + submit.relayed,
            submit.sampling,
            output,
            hasher=self._hasher,
            salt=submit.cache_salt,
            block_size=self.capacity.layout.block_size,
            one_token=one_token,
            reserve_tokens=reserve_tokens,
        )

    def attributes(self, message: Submit) -> Mapping[str, Attribute]:
        """What every span of a worker says."""
        return {
            "pdserve.request": message.key.request_id,
            "pdserve.attempt": message.key.attempt,
            "pdserve.worker": self.info.id,
            "pdserve.prompt_tokens": len(message.prompt_ids) + len(message.relayed),
        }

    def load(self, *, backlog_tokens: int, free_slots: int, linked: bool) -> WorkerLoad:
        """The load as routers see it. While a preempted sequence waits, its blocks are not for others."""
        return WorkerLoad(
            free_blocks=0 if self.scheduler.preempted_waiting else self.blocks.available,
            free_slots=free_slots,
            backlog_tokens=backlog_tokens,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            stuck=self.stuck,
            draining=self.info.state is WorkerState.DRAINING,
            linked=linked,
        )

    @property
    def stuck(self) -> bool:
        """Whether the engine holds work and has made no step for limits.stuck_seconds."""
        engine = self._engine
        return engine is not None and engine.stalled_seconds > self.config.limits.stuck_seconds

    def stopped(self, steps: int) -> None:
        """A cancelled sequence has given its blocks back, so many steps after its cancel."""
        self.figures.cancelled(steps)
        self.changed()

    def stepped(self, report: StepReport) -> None:
        """A step and all its ends are delivered."""
        self.figures.stepped(report)
        self._computed_tokens += report.tokens
        self._computing_seconds += report.tensors + report.forward + report.sampling
        self.changed()

    def seconds_to_compute(self, tokens: int) -> float | None:
        """What so many tokens take here, by all steps so far; None before the first."""
        if not self._computed_tokens:
            return None
        return tokens * self._computing_seconds / self._computed_tokens

    def changed(self) -> None:
        """Work or room has changed. Called after each transition, when its legs are closed: the engine, the
        routers and the audit may have use for it."""
        if self._engine is not None:
            self._engine.wake()
        self.on_change()

    @property
    def busy(self) -> bool:
        """Whether the engine holds any sequence."""
        return self._engine is not None and self._engine.busy

    def audit(self) -> None:
        """Recount every block and its holders; a failure is counted and logged, never raised into serving."""
        try:
            self.check_blocks()
        except (AuditFailed, AssertionError) as fault:
            self.figures.audit_failed()
            _log.error("audit of worker %s failed: %s", self.info.id, fault)

    def check_blocks(self) -> None:
        """The audit itself. Raises AuditFailed, or AssertionError from a part's own check."""
        self.blocks.check()
        holders = self.blocks.holders()
        for kind in HolderKind:
            held = {holder.key for holder in holders if holder.kind is kind}
            known = {key for watched, owners in self._owners if watched is kind for key in owners()}
            if held != known:
                raise AuditFailed(f"blocks are {kind.value} by {held}, their owners know of {known}")
        for check in self.checks:
            check()


def _nobody() -> None:
    """Until the host serves there is nobody to tell."""

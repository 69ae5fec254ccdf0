"""The engine: step after step, schedule -> run -> commit -> deliver.

A worker adds sequences and cancels them; what happens comes back through a StepSink, once per step. The
loop owns the only task that drives the runner, never awaits a socket and imports no torch.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from contracts.errors import EngineFailed, PdserveError
from contracts.requests import AttemptKey, Token
from engine.block_manager import BlockManager
from engine.runners.base import Drawn, Row, Runner, StepPlan, StepResult
from engine.scheduler import Schedule, Scheduler, Share
from engine.sequence import Sequence

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step did for one sequence: `computed` tokens from `start` on, and the token drawn, if any."""

    sequence: Sequence
    start: int
    computed: int
    token: Token | None


@dataclass(frozen=True, slots=True)
class StepReport:
    """Figures of one step, in seconds and counts."""

    schedule: float
    tensors: float
    forward: float
    sampling: float
    commit: float
    deliver: float
    rows: int
    tokens: int
    preempted: int


class StepSink(Protocol):
    """The worker's side of the engine. Calls are synchronous and must not block."""

    def admitted(self, sequence: Sequence) -> None:
        """The sequence holds blocks for all its tokens and takes part in the step that starts."""

    def delivered(self, advances: list[Advance]) -> None:
        """All of one step. Sequences whose token has a finish have left the engine already."""

    def failed(self, sequence: Sequence, error: PdserveError) -> None:
        """The sequence has left the engine because of an error."""

    def stepped(self, report: StepReport) -> None:
        """After everything of the step was delivered."""


class EngineLoop:
    """Runs until its task is cancelled. All methods belong to the event loop's thread."""

    def __init__(self, runner: Runner, scheduler: Scheduler, blocks: BlockManager, sink: StepSink) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._blocks = blocks
        self._sink = sink
        self._sequences: dict[AttemptKey, Sequence] = {}
        self._in_step: set[AttemptKey] = set()
        self._cancelled: dict[AttemptKey, Callable[[int], None]] = {}
        self._work = asyncio.Event()
        self.steps = 0  # begun so far
        self._last_progress = asyncio.get_running_loop().time()

    @property
    def sequences(self) -> dict[AttemptKey, Sequence]:
        """Every sequence in the engine."""
        return self._sequences

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._sequences)

    @property
    def stalled_seconds(self) -> float:
        """How long the engine has held work without finishing a step; 0 without work."""
        return asyncio.get_running_loop().time() - self._last_progress if self.busy else 0.0

    def add(self, sequence: Sequence) -> None:
        """A sequence without blocks: it waits for its turn."""
        self._accept(sequence)
        self._scheduler.add(sequence)

    def join(self, sequence: Sequence) -> None:
        """A sequence that holds its blocks: it runs from the next step on."""
        self._accept(sequence)
        self._scheduler.join(sequence)

    def cancel(self, key: AttemptKey, gone: Callable[[int], None]) -> bool:
        """Take a sequence out; `gone` is called once nothing writes to its blocks any more and they are
        released, with the number of steps that took: 0, or 1 when it is in the running step. False for an
        unknown key."""
        sequence = self._sequences.get(key)
        if sequence is None or key in self._cancelled:
            return False
        if key in self._in_step:
            self._cancelled[key] = gone
        else:
            self._leave(sequence)
            gone(0)
        return True

    def wake(self) -> None:
        """Blocks were released, so something may be able to run."""
        self._work.set()

    async def run(self) -> None:
        """Step while there is something to do, else wait for it."""
        while True:
            if not await self._step():
                self._work.clear()
                await self._work.wait()

    async def _step(self) -> bool:
        clock = asyncio.get_running_loop().time
        began = clock()
        schedule = self._scheduler.schedule()
        if not schedule.shares:
            return bool(schedule.preempted)
        # from here on a cancel waits for the step, also one that the sink makes while it is told who was admitted
        self._in_step = {share.sequence.key for share in schedule.shares}
        for sequence in schedule.admitted:
            self._sink.admitted(sequence)
        self.steps += 1
        plan = StepPlan(tuple(_row(share) for share in schedule.shares))
        scheduled = clock()
        try:
            result = await self._runner.run(plan)
        except Exception as error:  # noqa: BLE001 - whatever the model raises ends these sequences, not the engine
            self._fail_step(schedule, error)
            return True
        finally:
            self._in_step = set()
        ran = clock()
        advances, failures = self._commit(schedule, result)
        committed = clock()
        self._deliver(advances, failures)
        self._last_progress = clock()
        self._sink.stepped(
            StepReport(
                schedule=scheduled - began,
                tensors=result.times.tensors,
                forward=result.times.forward,
                sampling=result.times.sampling,
                commit=committed - ran,
                deliver=self._last_progress - committed,
                rows=len(plan.rows),
                tokens=sum(share.count for share in schedule.shares),
                preempted=len(schedule.preempted),
            )
        )
        return True

    def _commit(self, schedule: Schedule, result: StepResult) -> tuple[list[Advance], list[Sequence]]:
        """Sequences take in what the step computed; those that ended leave."""
        advances: list[Advance] = []
        failures: list[Sequence] = []
        for share, drawn in zip(schedule.shares, result.drawn, strict=True):
            sequence = share.sequence
            if sequence.key in self._cancelled:
                self._leave(sequence)
                self._cancelled.pop(sequence.key)(1)
                continue
            if drawn is not None and not drawn.finite:
                # whatever made the logits worthless may be in the KV: nobody may find these blocks again
                self._blocks.forget(sequence.holder)
                self._leave(sequence)
                failures.append(sequence)
                continue
            start = sequence.computed
            sequence.computed += share.count
            for block, block_hash in sequence.newly_full():
                self._blocks.seal(block, block_hash)
            token = self._append(sequence, drawn)
            advances.append(Advance(sequence, start, share.count, token))
        return advances, failures

    def _append(self, sequence: Sequence, drawn: Drawn | None) -> Token | None:
        if drawn is None:
            return None
        token = sequence.append(drawn.token_id, drawn.logprobs)
        if token.finish is not None or sequence.one_token:
            self._leave(sequence)
        return token

    def _deliver(self, advances: list[Advance], failures: list[Sequence]) -> None:
        if advances:
            self._sink.delivered(advances)
        for sequence in failures:
            self._sink.failed(sequence, EngineFailed("the model's logits for this request are not finite"))

    def _fail_step(self, schedule: Schedule, error: Exception) -> None:
        _log.error("a step of %d rows failed", len(schedule.shares), exc_info=error)
        for share in schedule.shares:
            sequence = share.sequence
            self._leave(sequence)
            gone = self._cancelled.pop(sequence.key, None)
            if gone is not None:
                gone(1)
            else:
                self._sink.failed(sequence, EngineFailed(f"the engine failed in a step: {type(error).__name__}"))

    def _accept(self, sequence: Sequence) -> None:
        if sequence.key in self._sequences:
            raise ValueError(f"{sequence.key} is in the engine already")
        if not self.busy:
            self._last_progress = asyncio.get_running_loop().time()
        self._sequences[sequence.key] = sequence
        self._work.set()

    def _leave(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        self._scheduler.remove(sequence)
        self._work.set()


def _row(share: Share) -> Row:
    sequence = share.sequence
    start = sequence.computed
    reaches_end = share.count == sequence.missing
    return Row(
        tokens=sequence.tokens[start : start + share.count],
        start=start,
        block_table=sequence.block_table,
        draw=sequence.draw() if reaches_end else None,
    )

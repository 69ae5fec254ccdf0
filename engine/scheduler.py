"""Which sequences take part in the next step, and with how many tokens.

Called by the loop between steps, never during one. Plain synchronous decisions: no torch, I/O or clock.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from contracts.kv import blocks_for
from engine.block_manager import BlockManager
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Share:
    """A sequence's part of a step: its next `count` tokens."""

    sequence: Sequence
    count: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step. `admitted` have left the waiting line in this step and hold blocks for all their tokens."""

    shares: tuple[Share, ...]
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]


def _order(sequence: Sequence) -> int:
    return sequence.order


class Scheduler:
    """First come, first served, under a budget of `step_tokens` tokens a step.

    Every running sequence that misses one token gets it in each step; what is left of the budget goes to
    longer catch-ups (prompt chunks) in order of arrival, but for one thing: while a prompt takes more than a step,
    up to half of each step goes to those behind it that this finishes. So a short prompt waits for one chunk of a
    long one and not for all of it, and the long one takes at most twice as long. A waiting sequence starts only
    with blocks for all its tokens and its reserve, so a prompt never stalls half-way. When a running sequence
    finds no block for its next token, the youngest of those that have outgrown their reserve is preempted: it
    gives up its blocks, waits at its place in the line and is computed again. Sequences within their reserve need
    no block and always end or outgrow it; of the others the oldest advances: so preemption ends.
    """

    def __init__(self, blocks: BlockManager, *, block_size: int, step_tokens: int, max_running: int) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._arrivals = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def sequences(self) -> Iterator[Sequence]:
        """All of them, running ones first."""
        yield from self.running
        yield from self.waiting

    @property
    def preempted_waiting(self) -> bool:
        """Whether a preempted sequence waits for blocks; it comes before any new reservation."""
        return any(sequence.preemptions for sequence in self.waiting)

    @property
    def backlog_tokens(self) -> int:
        """Tokens without KV over all sequences."""
        return sum(sequence.missing for sequence in self.sequences())

    def add(self, sequence: Sequence) -> None:
        """A sequence without blocks joins the end of the line."""
        self._arrive(sequence)
        self.waiting.append(sequence)

    def join(self, sequence: Sequence) -> None:
        """A sequence that holds blocks already takes part from the next step on."""
        self._arrive(sequence)
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A finished, failed or cancelled sequence leaves; its blocks are released."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._blocks.release(sequence.holder)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> Schedule:
        """The next step; no shares when nothing can run."""
        preempted: list[Sequence] = []
        shares: list[Share] = []
        budget = max(1, self._step_tokens - sum(sequence.missing == 1 for sequence in self.running))
        quick = self._quick(budget)
        for_quick = sum(quick.values())
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            index += 1
            if sequence.missing == 1:
                count = 1
            elif sequence in quick:
                count = sequence.missing
                for_quick -= count
            else:
                count = min(sequence.missing, budget - for_quick)
            if count and self._find_blocks(sequence, count, preempted):
                shares.append(Share(sequence, count))
                budget -= count if sequence.missing > 1 else 0
        admitted = self._admit(budget, shares, [s for s in self.waiting if s in quick]) if not preempted else []
        return Schedule(tuple(shares), tuple(admitted), tuple(preempted))

    def _quick(self, budget: int) -> dict[Sequence, int]:
        """Tokens of the prompts behind one that takes more than this step, which half of the step finishes. Those that
        wait are among them only if there are blocks for all that came before them, too."""
        prompts = [sequence for sequence in self.running if sequence.missing > 1]
        if not prompts or prompts[0].missing <= budget:
            return {}
        left, quick = budget // 2, dict[Sequence, int]()
        for sequence in prompts[1:]:
            if sequence.missing <= left:
                quick[sequence] = sequence.missing
                left -= sequence.missing
        blocks = 0
        for sequence in self.waiting[: self._max_running - len(self.running)]:
            blocks += blocks_for(max(len(sequence.tokens), sequence.reserve_tokens), self._block_size) + 1
            if blocks > self._blocks.available:
                break
            # at most what it turns out to be, as blocks may be cached
            if len(sequence.tokens) <= left:
                quick[sequence] = len(sequence.tokens)
                left -= len(sequence.tokens)
        return quick

    def _arrive(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.order = self._arrivals

    def _find_blocks(self, sequence: Sequence, count: int, preempted: list[Sequence]) -> bool:
        """Blocks for the sequence's next tokens, by preempting others if need be. False: it was preempted
        itself, or it is alone and waits for reservations to end."""
        needed = sequence.blocks_missing(sequence.computed + count)
        while needed > self._blocks.available:
            if len(self.running) == 1:
                return False
            # the sequence itself is one of them; they all come after it in this step, or are it
            victim = max((other for other in self.running if other.beyond_reserve), key=_order)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        if needed:
            sequence.append_blocks(self._blocks.extend(sequence.holder, needed))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._blocks.release(sequence.holder)
        sequence.drop_blocks()
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=_order)

    def _admit(self, budget: int, shares: list[Share], first: list[Sequence]) -> list[Sequence]:
        """Start sequences that wait: those of `first`, then the others in order of arrival."""
        admitted: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            sequence = first.pop(0) if first else self.waiting[0]
            length = len(sequence.tokens)
            # the last token is always computed: its logits are what the next token is drawn from
            matched = self._blocks.match(sequence.hashes(length - 1))
            fresh = blocks_for(max(length, sequence.reserve_tokens), self._block_size) - len(matched)
            # one block for each that will ask for more, itself included when others are there to take it
            growing = [other for other in (*self.running, sequence) if other.beyond_reserve]
            headroom = len(growing) if self.running else 0
            if not self._blocks.can_allocate(matched, fresh + headroom):
                break
            self.waiting.remove(sequence)
            sequence.append_blocks(self._blocks.allocate(sequence.holder, matched, fresh))
            sequence.computed = len(matched) * self._block_size
            if not sequence.preemptions:
                sequence.cached_tokens = sequence.computed
            insort(self.running, sequence, key=_order)
            admitted.append(sequence)
            count = min(sequence.missing, budget)
            shares.append(Share(sequence, count))
            budget -= count
        return admitted

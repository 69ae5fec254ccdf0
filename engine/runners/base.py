"""The seam that executes a step: torch_runner computes the model, simulated pretends to.

A plug's module has `create(...)`. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from contracts.kv import BlockStore
from contracts.requests import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw the token that follows a row. `position` (from 1) and `seed` key the random numbers;
    `banned` ids have probability zero (end tokens below min_tokens)."""

    seed: int
    position: int
    temperature: float
    top_p: float
    top_k: int
    logprobs: int | None
    banned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: compute `tokens` at positions start, start+1, ... (from 0) and write
    their KV through `block_table` (block of position p: block_table[p // block_size]). `draw` None: the
    chunk does not reach the sequence's end, no token is drawn."""

    tokens: Sequence[int]
    start: int
    block_table: Sequence[int] | npt.NDArray[np.int64]
    draw: Draw | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All rows of one step. Rows are independent: the result of one never depends on the others."""

    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token. `finite` False: the row's logits held NaN or infinity and the token is worthless."""

    token_id: int
    logprobs: TokenLogprobs | None
    finite: bool = True


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step inside the runner, by part."""

    tensors: float
    forward: float
    sampling: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """`drawn[i]` belongs to rows[i]; None where the row has no draw."""

    drawn: tuple[Drawn | None, ...]
    times: StepTimes


class Runner(Protocol):
    """Executes steps one at a time and owns the pool's memory."""

    @property
    def store(self) -> BlockStore: ...

    @property
    def vocab_size(self) -> int: ...

    async def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. Never called concurrently. Blocks not named in the plan are untouched."""

    async def close(self) -> None:
        """Free the pool and stop the runner's thread. Idempotent."""

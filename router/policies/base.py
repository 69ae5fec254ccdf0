"""The seam for placement: which worker of a role a request goes to. A plug's module has `create()`.

A policy is a choice over a snapshot: plain, synchronous, without I/O or a clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker that has room for the request. `load` is in the role's unit: prompt tokens outstanding
    (prefill) or requests placed (decode)."""

    worker_id: str
    load: int


class Policy(Protocol):
    """Chooses among candidates; there is always at least one, sorted by worker id."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate: ...

"""Placement plug: workers take turns."""

from collections.abc import Sequence

from router.policies.base import Candidate


class RoundRobin:
    """The next worker after the one chosen last, in order of id; one that is full misses its turn."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """The first candidate behind the last choice, else the first of all."""
        chosen = next((c for c in candidates if c.worker_id > self._last), candidates[0])
        self._last = chosen.worker_id
        return chosen


def create() -> RoundRobin:
    """A policy for the workers of one role."""
    return RoundRobin()

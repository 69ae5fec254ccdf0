"""Placement plug: the worker with the least load."""

from collections.abc import Sequence

from router.policies.base import Candidate


class LeastLoaded:
    """The candidate with the smallest load; of equals the lowest id."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """The first minimum: candidates come sorted by id."""
        return min(candidates, key=lambda c: c.load)


def create() -> LeastLoaded:
    """A policy for the workers of one role."""
    return LeastLoaded()

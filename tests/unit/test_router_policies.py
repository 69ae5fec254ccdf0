"""The two simple placement policies."""

from router.policies import least_loaded, round_robin
from router.policies.base import Candidate


def some(**loads: int) -> list[Candidate]:
    return [Candidate(worker_id, load) for worker_id, load in sorted(loads.items())]


def test_least_loaded_takes_the_smallest_and_of_equals_the_lowest_id() -> None:
    policy = least_loaded.create()
    assert policy.choose(some(a=2, b=1, c=3)).worker_id == "b"
    assert policy.choose(some(a=2, b=1, c=1)).worker_id == "b"


def test_round_robin_takes_turns_and_passes_over_the_missing() -> None:
    policy = round_robin.create()
    assert [policy.choose(some(a=9, b=0, c=0)).worker_id for _ in range(4)] == ["a", "b", "c", "a"]
    assert policy.choose(some(a=0, c=0)).worker_id == "c"
    assert policy.choose(some(a=0, b=0)).worker_id == "a"

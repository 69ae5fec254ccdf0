"""Every placement policy: a choice among the candidates that depends on nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.seams import load_plug, plugs
from router.policies.base import Candidate

SNAPSHOTS = st.lists(
    st.dictionaries(st.sampled_from("abcde"), st.integers(0, 9), min_size=1).map(
        lambda loads: [Candidate(worker_id, load) for worker_id, load in sorted(loads.items())]
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("name", plugs("policy"))
@given(snapshots=SNAPSHOTS)
def test_a_policy_chooses_one_of_the_candidates_and_the_same_again(name: str, snapshots: list[list[Candidate]]) -> None:
    one, other = load_plug("policy", name).create(), load_plug("policy", name).create()
    for candidates in snapshots:
        chosen = one.choose(candidates)
        assert chosen in candidates
        assert other.choose(candidates) == chosen

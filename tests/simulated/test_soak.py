"""3,000 requests on clusters on which everything goes wrong that can, from printed seeds.

One batch again: `make test ARGS="-k test_soak" PDSERVE_SOAK_SEED=17`. The full count: tests/soak/test_virtual.py.
"""

import pytest

from tests.helpers.soak import run_batch, soak
from tests.helpers.soak_grounds import GROUNDS


def test_3000_requests_under_faults() -> None:
    soak(3_000, coverage=0.9)


@pytest.mark.parametrize("seed", range(len(GROUNDS)))
def test_a_seed_repeats_its_run(seed: int) -> None:
    first, again = run_batch(seed), run_batch(seed)
    assert first.fired == again.fired
    assert [(one.tokens, str(one.error)) for one in first.clients] == [
        (one.tokens, str(one.error)) for one in again.clients
    ]

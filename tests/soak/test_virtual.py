"""100,000 requests in virtual time on clusters on which everything goes wrong that can, from printed seeds.

Run it: `make soak ARGS="-k virtual"`. One batch again: `make soak ARGS="-k virtual" PDSERVE_SOAK_SEED=17`.
"""

import pytest

from tests.helpers.soak import soak


@pytest.mark.soak
def test_100000_requests_under_faults() -> None:
    soak(100_000, coverage=1.0)

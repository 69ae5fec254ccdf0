"""3,000 requests on clusters on which everything goes wrong that can, from printed seeds.

One batch again: `make test ARGS="-k test_soak" PDSERVE_SOAK_SEED=17`. The full count: tests/soak/test_virtual.py.
"""

from tests.helpers.soak import soak


def test_3000_requests_under_faults() -> None:
    soak(3_000, coverage=0.9)

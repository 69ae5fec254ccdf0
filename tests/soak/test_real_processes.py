"""300 requests on real processes that kill, stop and disturb themselves, over every transport.

Run it: `make soak ARGS="-k real_processes"`.
"""

from pathlib import Path

import pytest

from tests.helpers.process_soak import soak_processes


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "nccl", "grpc", "auto"])
async def test_60_requests_under_faults(transport: str, tmp_path: Path) -> None:
    await soak_processes(tmp_path, seed=1, requests=60, transport=transport)

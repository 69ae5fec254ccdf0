"""A dozen requests on real processes that kill, stop and disturb themselves. The full count: tests/soak/."""

from pathlib import Path

from tests.helpers.process_soak import soak_processes


async def test_12_requests_under_faults(tmp_path: Path) -> None:
    await soak_processes(tmp_path, seed=3, requests=12, transport="auto")

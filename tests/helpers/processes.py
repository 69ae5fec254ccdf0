"""Which processes descend from one, and whether they have ended: by the kernel's handles, never by polling."""

import asyncio
import os
import select
import signal
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Processes below `pid` that have not ended."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


async def ended(pids: set[int], seconds: float = 15.0) -> None:
    """Returns when all have ended; fails the test with those that have not."""
    await asyncio.to_thread(_wait, pids, seconds)


def kill_and_wait(pid: int) -> None:
    """SIGKILL, and the process is gone when this returns."""
    os.kill(pid, signal.SIGKILL)
    _wait({pid}, 5.0)


def kill_all(pids: set[int]) -> None:
    """SIGKILL to those that have not ended, and all are gone when this returns."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    _wait(pids, 5.0)


def _wait(pids: set[int], seconds: float) -> None:
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            gone = select.select([handle], [], [], seconds)[0]
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") if not gone else b""
            assert gone, f"process {pid} is left: {command.decode()}"
        finally:
            os.close(handle)

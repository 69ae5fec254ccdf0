"""How much memory this process can still get: what the machine has free, and what its control groups' limits leave.

The pool asks before it allocates, `pdserve doctor` before anything starts: beyond a limit the kernel does not refuse,
but ends a process. It must never guess: what the system does not tell is no limit.
"""

from collections.abc import Iterator
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that the system can give without swapping (proc_meminfo(5)) and the control groups allow (cgroups(7), both
    versions). `root`: of the file system."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    return min([free, *_left(root)])


def _left(root: Path) -> Iterator[int]:
    """What each group that this process is in, directly or by its parents, leaves of its limit."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.lstrip("/")
        # a container may see its own group as the root, and the path from outside
        for folder in (group, *group.parents):
            if folder.is_relative_to(base):
                yield from _left_in(folder, *files)


def _left_in(folder: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    """Nothing without a limit. The file cache counts as used, but is given back when memory is needed."""
    if not (folder / limit).exists():
        return
    most = (folder / limit).read_text().strip()
    if most != "max":
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        yield max(0, int(most) - int((folder / used).read_text()) + int(stat[cache]))

"""What is left of the machine's memory and of every limit that a process is under."""

from pathlib import Path

import pytest

from contracts.errors import StartupError
from contracts.kv import KvLayout
from engine import pool_memory
from engine.available_memory import available_memory
from engine.pool_memory import PoolMemory

MIB = 1 << 20
LAYOUT = KvLayout("m", "t", "n", "float32", layers=3, kv_heads=2, head_dim=4, block_size=5, rope="r")


def machine(root: Path, cgroup: str) -> None:
    """With 8 GiB free; `cgroup` is /proc/self/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8388608 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)


def group(root: Path, path: str, limit: str, used: int, cache: int) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    second = "memory/" in f"{path}/"
    names = (
        ("limit_in_bytes", "usage_in_bytes", "total_inactive_file") if second else ("max", "current", "inactive_file")
    )
    (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
    (folder / f"memory.{names[1]}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    group(tmp_path, "", "max", 5 * MIB, 0)
    assert available_memory(tmp_path) == 8 << 30


def test_a_limit_counts_without_the_file_cache(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    group(tmp_path, "", str(1000 * MIB), 700 * MIB, 200 * MIB)
    assert available_memory(tmp_path) == 500 * MIB


def test_the_limit_of_a_parent_counts(tmp_path: Path) -> None:
    machine(tmp_path, "0::/pod/container\n")
    group(tmp_path, "pod", str(100 * MIB), 40 * MIB, 0)
    group(tmp_path, "pod/container", "max", 30 * MIB, 0)
    assert available_memory(tmp_path) == 60 * MIB


@pytest.mark.parametrize("seen", ["memory/docker/x", "memory"])
def test_the_older_version_also_with_a_path_from_outside(seen: str, tmp_path: Path) -> None:
    machine(tmp_path, "5:cpu,memory:/docker/x\n1:name=systemd:/docker/x\n0::/\n")
    group(tmp_path, seen, str(100 * MIB), 90 * MIB, 0)
    assert available_memory(tmp_path) == 10 * MIB


def test_over_its_limit_nothing_is_left(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    group(tmp_path, "", str(MIB), 2 * MIB, 0)
    assert available_memory(tmp_path) == 0


def test_this_machine_has_some() -> None:
    assert available_memory() > 0


def test_a_pool_beyond_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_memory, "available_memory", lambda: MIB)
    PoolMemory(LAYOUT, 4).close()
    with pytest.raises(StartupError, match=r"only 0.00 GiB are free"):
        PoolMemory(LAYOUT, MIB // LAYOUT.block_bytes)

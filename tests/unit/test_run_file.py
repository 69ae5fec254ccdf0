"""The run file names a process that runs, and never one that has gone."""

import dataclasses
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.run_file import RunFile, RunRecord, start_ticks
from contracts.errors import ConfigError, StartupError


def record(tmp_path: Path, pid: int | None = None, started: int | None = None) -> RunRecord:
    pid = pid or os.getpid()
    directory = tmp_path / "pdserve-x"
    directory.mkdir(exist_ok=True)
    return RunRecord(pid, started or start_ticks(pid) or 0, "ns", str(directory))


def test_claim_update_remove(tmp_path: Path) -> None:
    file = RunFile(tmp_path, "ns")
    assert file.read() is None
    claimed = record(tmp_path)
    file.claim(claimed)
    assert file.read() == claimed
    ready = dataclasses.replace(claimed, http="127.0.0.1:1", grpc="127.0.0.1:2", redis_url="unix:///s")
    file.update(ready)
    assert file.read() == ready
    assert stat.S_IMODE((tmp_path / "run" / "ns.json").stat().st_mode) == 0o600
    file.remove()
    file.remove()
    assert file.read() is None
    assert not list((tmp_path / "run").iterdir())


def test_one_process_a_namespace(tmp_path: Path) -> None:
    RunFile(tmp_path, "ns").claim(record(tmp_path))
    with pytest.raises(StartupError, match=f"namespace 'ns' already runs as process {os.getpid()}; .*pdserve down"):
        RunFile(tmp_path, "ns").claim(record(tmp_path))
    RunFile(tmp_path, "other").claim(record(tmp_path))


def test_a_stale_file_is_cleared_with_its_directory(tmp_path: Path) -> None:
    # The pid is ours, the start is not: a later process with the pid of the one that wrote the file.
    stale = record(tmp_path, started=1)
    (tmp_path / "run").mkdir()
    file = RunFile(tmp_path, "ns")
    file.update(stale)
    assert file.read() is None
    assert not Path(stale.directory).exists()
    file.update(dataclasses.replace(stale, directory=str(tmp_path / "run")))
    file.claim(record(tmp_path))
    assert (tmp_path / "run").exists(), "a directory that is none of ours stays"


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"pid": 1}', '{"pid": 1, "of": "another version"}'])
def test_a_damaged_file_protects_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ns.json").write_text(content)
    file = RunFile(tmp_path, "ns")
    assert file.read() is None
    file.claim(record(tmp_path))


def test_a_process_that_ended_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ticks = start_ticks(child.pid)
        assert ticks is not None
        assert ticks >= (start_ticks(os.getpid()) or 0)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_ticks(child.pid) is None, "a zombie has ended"
    assert start_ticks(child.pid) is None


@pytest.mark.parametrize("namespace", ["", "../x", "a/b", ".hidden", "a" * 65, "a\n"])
def test_a_namespace_is_a_file_name(tmp_path: Path, namespace: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.namespace takes letters"):
        RunFile(tmp_path, namespace)


def test_a_cache_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="cannot use the cache directory .*file: Not a directory"):
        RunFile(tmp_path / "file", "ns").claim(record(tmp_path))

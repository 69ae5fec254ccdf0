"""What runs in a namespace, for other shells: <cache>/run/<namespace>.json, readable by its owner only.

`pdserve up` claims it, `pdserve status` and `pdserve down` read it. A file whose process is gone is stale: the
next reader removes it together with the directory that the dead process could not remove.
"""

import dataclasses
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import ConfigError, StartupError

# Prefix of the private directory of a run, so that a damaged file can never name another one.
DIRECTORY_PREFIX = "pdserve-"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One running cluster. `started`: the process's start in clock ticks since boot, which tells a process
    from a later one with the same pid. `http` is "" until the cluster is ready."""

    pid: int
    started: int
    namespace: str
    directory: str
    redis_url: str = ""
    http: str = ""
    grpc: str = ""

    def alive(self) -> bool:
        """Whether that very process still runs."""
        return start_ticks(self.pid) == self.started


class RunFile:
    """The file of one namespace. Raises ConfigError when the namespace cannot be a file name."""

    def __init__(self, cache: Path, namespace: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", namespace):
            raise ConfigError(
                f"cluster.namespace takes letters, digits, '.', '_' and '-', not {namespace!r}",
                param="cluster.namespace",
            )
        self._path = cache / "run" / f"{namespace}.json"

    def claim(self, record: RunRecord) -> None:
        """Write the first record. Raises StartupError while another process runs here, or the folder cannot
        be written."""
        with self._locked():
            other = self._read_alive()
            if other is not None:
                raise StartupError(
                    f"namespace {record.namespace!r} already runs as process {other.pid}; stop it with `pdserve down`, "
                    "or choose another with --set cluster.namespace=NAME"
                )
            self._write(record)

    def update(self, record: RunRecord) -> None:
        """Replace our own record."""
        with self._locked():
            self._write(record)

    def read(self) -> RunRecord | None:
        """The record of a process that runs; a stale one is cleared away."""
        if not self._path.exists():
            return None
        with self._locked():
            return self._read_alive()

    def remove(self) -> None:
        """Our process ends. Idempotent."""
        self._path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise StartupError(f"cannot use the cache directory {folder.parent}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _read_alive(self) -> RunRecord | None:
        try:
            record = RunRecord(**json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):  # not ours, or of another version: it protects nobody
            self.remove()
            return None
        if record.alive():
            return record
        self.remove()
        directory = Path(record.directory)
        if directory.name.startswith(DIRECTORY_PREFIX):
            shutil.rmtree(directory, ignore_errors=True)
        return None

    def _write(self, record: RunRecord) -> None:
        draft = self._path.with_suffix(".new")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                json.dump(dataclasses.asdict(record), stream)
            draft.replace(self._path)
        except OSError as error:
            raise StartupError(f"cannot write {self._path}: {error.strerror}") from error


def start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (field 22 of /proc/<pid>/stat); None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return None if state in "ZX" else int(fields[18])

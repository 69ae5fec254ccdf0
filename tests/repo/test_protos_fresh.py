"""The committed protobuf code is what the .proto files give."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from protos import generate

ROOT = Path(__file__).resolve().parents[2]


def test_committed_code_is_fresh() -> None:
    assert generate.main(["--check"], ROOT) == 0


def test_check_names_stale_missing_and_left_over_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    folder = tmp_path / "protos" / "pdserve" / "v1"
    (folder / "common_pb2.py").write_text("# stale\n")
    (folder / "session_pb2.pyi").unlink()
    (folder / "old_pb2.py").write_text("# left over\n")
    stale = ("common_pb2.py", "session_pb2.pyi", "old_pb2.py")

    assert generate.main(["--check"], tmp_path) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(stale)
    assert all(any(f"protos/pdserve/v1/{name} is stale" in line for line in lines) for name in stale)

    assert generate.main([], tmp_path) == 0
    assert generate.main(["--check"], tmp_path) == 0
    assert not (folder / "old_pb2.py").exists()


def test_every_message_field_and_method_is_documented() -> None:
    for proto in sorted((ROOT / "protos" / "pdserve" / "v1").glob("*.proto")):
        lines = [line.strip() for line in proto.read_text().splitlines()]
        for before, line in pairwise(lines):
            words = line.split(" ")
            declares = words[0] in ("message", "enum", "service", "rpc", "oneof") or (
                line.endswith(";") and " = " in line and words[0] not in ("syntax", "package", "import")
            )
            assert not declares or before.startswith("//"), f"{proto.name}: no comment above {line!r}"

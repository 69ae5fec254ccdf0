"""The repository as the tests of its own rules see it: source files by package, generated code apart."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def packages() -> list[str]:
    """Top-level folders that are installed."""
    return sorted(init.parent.name for init in ROOT.glob("*/__init__.py"))


def generated(path: Path) -> bool:
    """Whether protoc wrote the file."""
    return path.is_relative_to(ROOT / "protos" / "pdserve")


def sources() -> Iterator[Path]:
    """Every module of every package that people wrote."""
    for package in packages():
        yield from (path for path in sorted((ROOT / package).rglob("*.py")) if not generated(path))


def name(path: Path) -> str:
    """The path as people write it."""
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    """The parsed module."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))

"""Rules of style that ruff has no word for, or that must not be switched off in passing."""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.source_tree import name, sources, tree

_UNDONE = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b")
_BARE_IGNORE = re.compile(r"#\s*(noqa(?!:)|type:\s*ignore(?!\[))")


@pytest.fixture(scope="module")
def files() -> list[Path]:
    return list(sources())


def test_inits_are_empty(files: list[Path]) -> None:
    """A package is no hub of re-exports; pdserve/ is the facade for users."""
    inits = [path for path in files if path.name == "__init__.py" and name(path) != "pdserve/__init__.py"]
    assert not [name(path) for path in inits if path.read_text().strip()]


def test_modules_say_what_they_are(files: list[Path]) -> None:
    modules = [path for path in files if path.name != "__init__.py"]
    assert not [name(path) for path in modules if not ast.get_docstring(tree(path))]


def test_no_print_and_no_bare_except(files: list[Path]) -> None:
    wrong = []
    for path in files:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                wrong.append(f"{name(path)}:{node.lineno}: print")
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{name(path)}:{node.lineno}: bare except")
    assert not wrong


def test_nothing_is_left_undone_and_no_ignore_is_general(files: list[Path]) -> None:
    wrong = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if _UNDONE.search(line) or _BARE_IGNORE.search(line)
    ]
    assert not wrong

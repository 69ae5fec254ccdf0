"""What the documents name exists."""

import ast
import re

from tests.helpers.source_tree import ROOT, name, packages, tree

_MAP_ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
_LINK = re.compile(r"\]\((?!\w+:)([^)#]+)")
_IN_CODE = re.compile(r"`([\w/]+\.py):\s?([\w.]+)`")


def test_the_file_map_is_true_and_complete() -> None:
    """The table whose rows begin with a folder or file in code quotes."""
    entries = _MAP_ROW.findall((ROOT / "README.md").read_text())
    missing = [entry for entry in entries if not (ROOT / entry).exists()]
    assert not missing, f"named by the README, and not there: {missing}"
    unnamed = set(packages()) - {entry.strip("/") for entry in entries}
    assert not unnamed, f"not named by the README: {unnamed}"


def test_links_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{name(document)}: {target}"
        for document in documents
        for target in _LINK.findall(document.read_text())
        if not (document.parent / target).exists()
    ]
    assert not broken


def test_the_request_path_names_what_exists() -> None:
    references = _IN_CODE.findall((ROOT / "docs" / "request-path.md").read_text())
    assert references
    wrong = [f"{file}: {member}" for file, member in references if not defines(file, member)]
    assert not wrong


def defines(file: str, member: str) -> bool:
    """Whether the file has the function or class, or the Class.method."""
    if not (ROOT / file).is_file():
        return False
    node: ast.AST = tree(ROOT / file)
    for part in member.split("."):
        inside = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part]
        if not inside:
            return False
        node = inside[0]
    return True


def test_defines_can_say_no() -> None:
    assert defines("tests/repo/test_readme_map.py", "defines")
    assert not defines("tests/repo/test_readme_map.py", "defines.absent")
    assert not defines("tests/repo/absent.py", "defines")

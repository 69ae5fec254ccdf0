"""docs/configuration.md names every key with its default, and no other."""

import dataclasses
import re
from pathlib import Path

from contracts.config import Config
from contracts.config_loader import load_config

ROWS = re.findall(
    r"^\| `([a-z]+\.[a-z_]+)` \| ([^|]+) \|", Path("docs/configuration.md").read_text(encoding="utf-8"), re.MULTILINE
)


def defaults() -> dict[str, object]:
    tree = Config()
    return {
        f"{branch.name}.{leaf.name}": getattr(getattr(tree, branch.name), leaf.name)
        for branch in dataclasses.fields(tree)
        for leaf in dataclasses.fields(getattr(tree, branch.name))
    }


def test_every_key_is_there_once() -> None:
    assert sorted(key for key, _ in ROWS) == sorted(defaults())


def test_defaults_are_true() -> None:
    for key, written in ROWS:
        default = defaults()[key]
        if default != "":
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert written == shown, key


def test_the_example_is_valid() -> None:
    assert load_config(Path("deploy/pdserve.toml")).cluster.decode == 2

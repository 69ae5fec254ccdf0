"""Joins the Prometheus texts of several processes into one.

The router calls it on /metrics with its own text and those that its workers answered. It works on lines,
because parsing every sample would hold up the router's event loop.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Family:
    """One metric family: its HELP and TYPE lines, as first seen, and the samples of all processes."""

    header: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def merge_expositions(parts: Iterable[tuple[dict[str, str], str]]) -> str:
    """One exposition from (labels, text) pairs: each sample gets the labels of its part, HELP and TYPE
    appear once per family.

    The texts are as prometheus_client writes them: HELP and TYPE before the samples of their family. A
    label that a sample already has is kept as it is.
    """
    families: dict[str, _Family] = {}
    for labels, text in parts:
        pairs = [(name, f'{name}="{_escape(value)}"') for name, value in labels.items()]
        family = None
        described = set(families)  # by earlier parts
        for line in text.splitlines():
            if line.startswith("#"):
                words = line.split(" ", 3)
                if len(words) < 3 or words[1] not in ("HELP", "TYPE"):
                    continue
                family = families.setdefault(words[2], _Family())
                if words[2] not in described:
                    family.header.append(line)
            elif line and family is not None:
                family.samples.append(_labelled(line, pairs))
    return "".join(f"{line}\n" for family in families.values() for line in family.header + family.samples)


def _labelled(line: str, pairs: list[tuple[str, str]]) -> str:
    """The sample line with the pairs as its first labels."""
    name, brace, rest = line.partition("{")
    if not brace:
        name, _, value = line.partition(" ")
        joined = ",".join(pair for _, pair in pairs)
        return f"{name}{{{joined}}} {value}" if joined else line
    # A quote inside a value is escaped, so `label="` after "{" or "," can only be a label.
    added = [pair for label, pair in pairs if f'{{{label}="' not in line and f',{label}="' not in line]
    return f"{name}{{{','.join([*added, rest])}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

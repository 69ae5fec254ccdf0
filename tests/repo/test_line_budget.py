"""Files stay small enough to be read in one go."""

import sys
from collections import Counter

import pytest

from tests.helpers.source_tree import ROOT, generated, name, sources

MOST = 400


def test_no_file_is_over_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    files = [*sources(), *(path for path in (ROOT / "tests").rglob("*.py") if not generated(path))]
    lines = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    totals: Counter[str] = Counter()
    for file, count in lines.items():
        totals[file.split("/")[0]] += count
    with capsys.disabled():
        report = ", ".join(f"{package} {total}" for package, total in sorted(totals.items()))
        total = f"\nlines: {report}; in all {totals.total()}, apart from tests {totals.total() - totals['tests']}\n"
        sys.stdout.write(total)
    over = {file: count for file, count in lines.items() if count > MOST}
    assert not over

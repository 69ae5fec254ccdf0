"""What the benchmarks print: lines and tables of rows, for people."""

from collections.abc import Sequence

Row = dict[str, float | str]
"""A figure or a text by column. A row may lack columns."""


def print_line(line: str) -> None:
    """At once, also into a pipe."""
    print(line, flush=True)  # noqa: T201 - a benchmark's output


def print_table(rows: Sequence[Row]) -> None:
    """The columns of all rows, in the order in which they come up."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    print_line("| " + " | ".join(columns) + " |")
    print_line("|" + "---|" * len(columns))
    for row in rows:
        print_line("| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |")


def _cell(value: float | str) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)

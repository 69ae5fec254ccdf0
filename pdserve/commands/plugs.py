"""`pdserve plugs`: what can be plugged into each seam."""

import typer

from contracts.seams import SEAMS
from contracts.seams import plugs as plugs_of


def plugs() -> None:
    """List the seams and their plugs."""
    width = max(map(len, SEAMS))
    for seam in SEAMS:
        typer.echo(f"{seam.ljust(width)}  {', '.join(plugs_of(seam)) or '-'}")

"""The `pdserve` command: one module per subcommand in pdserve/commands/.

Whatever goes wrong on purpose is one line on stderr and exit code 1, or 2 when the call itself is wrong.
Commands import ray, torch and the like when they run, so that `pdserve --help` answers at once.
"""

import sys

import typer

from contracts.errors import ConfigError, PdserveError
from pdserve.commands.bench import bench
from pdserve.commands.doctor import doctor
from pdserve.commands.down import down
from pdserve.commands.plugs import plugs
from pdserve.commands.status import status
from pdserve.commands.up import up


def build_app() -> typer.Typer:
    """The command tree."""
    app = typer.Typer(
        help="Serve large language models with prefill and decode on different workers.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in (up, status, down, bench, doctor, plugs):
        app.command()(command)
    return app


def main() -> None:
    """Entry point of the console script."""
    try:
        build_app()()
    except PdserveError as error:
        typer.echo(f"pdserve: {error.message}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)

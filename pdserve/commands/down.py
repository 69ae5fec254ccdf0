"""`pdserve down`: end the cluster that another shell started."""

import os
import select
import signal

import typer

from cluster.run_file import RunFile
from contracts.errors import StartupError
from pdserve.commands.options import CacheDir, ConfigFile, Settings, configuration

# Asked, then pressed, then killed; seconds to wait after each. Ray and Valkey end with the process either way.
_STEPS = ((signal.SIGTERM, 15.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))


def down(*, cache_dir: CacheDir = None, config: ConfigFile = None, settings: Settings = None) -> None:
    """Stop the running cluster and wait until it is gone."""
    tree = configuration(config, settings, model__cache_dir=cache_dir)
    run_file = RunFile(tree.model.cache_path(), tree.cluster.namespace)
    record = run_file.read()
    if record is None:
        typer.echo(f"nothing runs in namespace {tree.cluster.namespace!r}")
        return
    try:
        handle = os.pidfd_open(record.pid)
    except ProcessLookupError:
        typer.echo("stopped")
        return
    try:
        # Only with the handle in hand is it certain that the pid is still that process's.
        if record.alive() and not _end(handle):
            raise StartupError(f"process {record.pid} does not end")
    finally:
        os.close(handle)
    run_file.read()  # clears away what a killed process left
    typer.echo("stopped")


def _end(handle: int) -> bool:
    """Whether the process has ended: its handle becomes readable then."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    for number, seconds in _STEPS:
        try:
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return True
        if poll.poll(seconds * 1000):
            return True
    return False

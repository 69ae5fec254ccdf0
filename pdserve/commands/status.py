"""`pdserve status`: who is registered in a namespace that runs on this machine, and how loaded they are."""

import asyncio
import json
from typing import Any

import typer

from cluster.run_file import RunFile
from contracts.errors import StartupError
from contracts.seams import load_plug
from pdserve.commands.options import AsJson, CacheDir, ConfigFile, Settings, configuration
from shared_state.backends.base import BackendUnavailable

_COLUMNS = ("id", "role", "state", "address", "pid", "incarnation")


def status(
    *, as_json: AsJson = False, cache_dir: CacheDir = None, config: ConfigFile = None, settings: Settings = None
) -> None:
    """Show the routers and workers of the running cluster."""
    tree = configuration(config, settings, model__cache_dir=cache_dir)
    record = RunFile(tree.model.cache_path(), tree.cluster.namespace).read()
    if record is None:
        raise StartupError(f"nothing runs in namespace {tree.cluster.namespace!r}; start it with `pdserve up`")
    if not record.redis_url:
        raise StartupError(f"the cluster in namespace {record.namespace!r} is still starting")
    workers, loads = asyncio.run(_read(record.redis_url, record.namespace))
    if as_json:
        typer.echo(json.dumps({"workers": workers, "loads": loads}))
        return
    rows = [_COLUMNS, *(tuple(str(worker[column]) for column in _COLUMNS) for worker in workers)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_COLUMNS))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


async def _read(redis_url: str, namespace: str) -> tuple[list[dict[str, Any]], dict[str, dict[str, int]]]:
    """All processes, and by id the load that each worker announced last; a router announces none."""
    from shared_state.registry import Registry

    backend = load_plug("registry", "redis").create(redis_url)
    try:
        registry = Registry(backend, namespace)
        found, loads = await registry.workers(), await registry.loads()
    except BackendUnavailable as error:
        raise StartupError(f"the registry cannot be read: {error}") from error
    finally:
        await backend.close()
    workers = [
        {
            "role": worker.role.value,
            "id": worker.id,
            "pid": worker.pid,
            "address": worker.address,
            "incarnation": worker.incarnation,
            "state": worker.state.value,
        }
        for worker in found
    ]
    figures = {
        worker_id: {"running": load.running, "waiting": load.waiting, "free_blocks": load.free_blocks}
        for worker_id, load in loads.items()
    }
    return workers, figures

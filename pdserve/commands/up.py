"""`pdserve up`: start a cluster and serve until Ctrl-C or SIGTERM."""

import asyncio
import logging
import signal
from typing import Annotated

import typer

from contracts.config import Config
from pdserve.commands.options import CacheDir, ConfigFile, Settings, configuration

GRACE_SECONDS = 5.0


def up(
    *,
    model: Annotated[str | None, typer.Option(help="A known name, a .gguf file, or a Hugging Face directory.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name in the API.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    mode: Annotated[str | None, typer.Option(help="disaggregated or aggregated.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="Where the model is computed.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of a worker; 0 divides the cores.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV pool of a worker, such as 512MiB.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Longest context; 0 is the model's own.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Sequences that a worker runs at once.")] = None,
    step_tokens: Annotated[int | None, typer.Option(help="Token budget of a step.")] = None,
    host: Annotated[str | None, typer.Option(help="Address that the router listens on.")] = None,
    http_port: Annotated[int | None, typer.Option(help="0 lets the system choose.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="0 lets the system choose.")] = None,
    address: Annotated[str | None, typer.Option(help="A Ray cluster to join, instead of our own.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="A Redis to use, instead of our own.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    cache_dir: CacheDir = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Start router, prefill and decode workers and serve until Ctrl-C (twice: at once)."""
    tree = configuration(
        config,
        settings,
        model__name=model,
        model__served_name=served_model_name,
        model__dtype=dtype,
        model__device=device,
        model__max_context=max_context,
        model__cache_dir=cache_dir,
        cluster__prefill=prefill,
        cluster__decode=decode,
        cluster__mode=mode,
        cluster__ray_address=address,
        cluster__redis_url=redis_url,
        engine__threads=threads,
        engine__max_running=max_running,
        engine__step_tokens=step_tokens,
        kv__memory=kv_memory,
        kv__block_size=block_size,
        router__host=host,
        router__http_port=http_port,
        router__grpc_port=grpc_port,
        telemetry__log_level=log_level,
    )
    # Warnings only: what happens is told stage by stage, details are in the nodes' logs.
    logging.basicConfig(level=logging.WARNING, format="pdserve: %(message)s")
    asyncio.run(serve(tree))


async def serve(config: Config) -> None:
    """Launch, wait for a signal, drain, close. Raises PdserveError when the launch fails."""
    from cluster.launch import launch

    stop, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    launching = loop.create_task(launch(config, typer.echo))
    if not await _finished_before(launching, stop):
        typer.echo("stopping")
        return
    cluster = launching.result()
    try:
        await stop.wait()
        typer.echo(f"stopping: up to {GRACE_SECONDS:.0f} s for running requests; Ctrl-C again stops at once")
        await _finished_before(loop.create_task(cluster.drain(GRACE_SECONDS)), at_once)
    finally:
        await cluster.close()
    typer.echo("stopped")


async def _finished_before(task: "asyncio.Task[object]", event: asyncio.Event) -> bool:
    """Whether the task ended first. It is cancelled, and has ended, when the event came first; its error is
    raised when it failed first."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.result()
        return False
    finally:
        waiting.cancel()

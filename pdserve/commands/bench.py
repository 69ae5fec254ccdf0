"""`pdserve bench`: a closed loop of requests against any OpenAI URL."""

import asyncio
import json
from typing import Annotated

import typer

from pdserve.commands.options import AsJson


def bench(
    *,
    url: Annotated[str, typer.Option(help="Base URL, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="The model's name; empty asks the server.")] = "",
    api_key: Annotated[str, typer.Option(help="For a server that wants one.")] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 32,
    input_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, about.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    seed: Annotated[int, typer.Option(help="Draws the prompts.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure TTFT, TPOT, inter-token gaps and tokens per second."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from loadgen.workload import BenchOptions, run_bench

    options = BenchOptions(
        url=url,
        model=model,
        api_key=api_key,
        concurrency=concurrency,
        requests=requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        seed=seed,
    )
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("requests", total=requests)
        report = asyncio.run(run_bench(options, lambda done, total: progress.update(bar, completed=done, total=total)))
    typer.echo(json.dumps(report.as_dict()) if as_json else report.table())
    if not report.succeeded:
        raise typer.Exit(1)

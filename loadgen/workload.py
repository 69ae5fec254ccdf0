"""A closed loop: so many users, each sends its next request when the last one has ended.

`pdserve bench` and the benchmarks call `run_bench`.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import httpx

from contracts.errors import ConfigError
from loadgen.client import LoadClient, Sample, first_model
from loadgen.report import BenchReport, summarize

_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service "
    "friend father power hour game line end member law car city name team minute idea body back parent face"
)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`url` is a server's base URL, without /v1; `model` "" takes the first that the server names.

    `input_tokens` is kept about: a prompt has as many common English words, and the template adds its
    own. `output_tokens` is exact where the server honours `ignore_eos`, else the most.
    """

    url: str
    model: str = ""
    api_key: str = field(default="", repr=False)
    requests: int = 32
    concurrency: int = 4
    input_tokens: int = 128
    output_tokens: int = 64
    ignore_eos: bool = True
    seed: int = 0


async def run_bench(options: BenchOptions, on_progress: Callable[[int, int], None]) -> BenchReport:
    """Send all requests and report. `on_progress(ended, requests)` is called after each request.

    Raises ConfigError for a URL that is none, StartupError when no model is named and the server does
    not name one. What goes wrong with single requests is counted in the report.
    """
    loop = asyncio.get_running_loop()
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=options.concurrency, max_keepalive_connections=options.concurrency)
    try:
        http = httpx.AsyncClient(base_url=options.url, headers=headers, timeout=_TIMEOUT, limits=limits)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {options.url!r}: {error}", param="url") from error
    samples: list[Sample] = []
    async with http:
        client = LoadClient(http, options.model or await first_model(http))
        waiting = prompts(options)

        async def user() -> None:
            for prompt in waiting:  # shared by all users: each prompt is taken once
                samples.append(await client.complete(prompt, options.output_tokens, options.ignore_eos))
                on_progress(len(samples), options.requests)

        begun = loop.time()
        async with asyncio.TaskGroup() as users:
            for _ in range(options.concurrency):
                users.create_task(user())
        return summarize(samples, loop.time() - begun)


def prompts(options: BenchOptions) -> Iterator[str]:
    """The prompts, the same for the same options; random from the first word on, so that no prefix cache
    helps."""
    words = _WORDS.split()
    random = Random(options.seed)  # noqa: S311 - no secret
    for _ in range(options.requests):
        yield " ".join(random.choices(words, k=options.input_tokens))

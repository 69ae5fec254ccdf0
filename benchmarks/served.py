"""A cluster of its own for a benchmark, as its clients see it: `pdserve up` in a process, streams over HTTP, metrics.

benchmarks/interference.py uses it. It measures at the client's socket and touches nothing of another cluster.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from contracts.errors import PdserveError, StartupError

START_SECONDS = 120.0
STOP_SECONDS = 30.0
IDLE_SECONDS = 30.0
ASK_AGAIN_SECONDS = 0.2
HELD = ("pdserve_requests_running", "pdserve_requests_waiting", "pdserve_leases", "pdserve_router_running")


class Metrics:
    """One scrape of the whole cluster."""

    def __init__(self, exposition: str) -> None:
        families = text_string_to_metric_families(exposition)
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels."""
        found = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        return float(sum(found))

    def by(self, name: str, *keys: str) -> dict[tuple[str, ...], float]:
        """The same by the values of these labels."""
        found: dict[tuple[str, ...], float] = {}
        for sample in self._samples:
            if sample.name == name:
                key = tuple(sample.labels.get(label, "") for label in keys)
                found[key] = found.get(key, 0.0) + sample.value
        return found


class Served:
    """A cluster that is ready. `http` has its base URL."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def tokens(self, prompt: Sequence[int], count: int) -> AsyncGenerator[float, None]:
        """The time (of time.perf_counter) at which each of exactly `count` tokens arrives.
        Closing it hangs up. Raises PdserveError when the answer is not whole."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": count,
            "ignore_eos": True,
            "temperature": 0,
            "logprobs": 0,  # so that each token is an event, also one without text
            "stream": True,
        }
        came = 0
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise PdserveError(f"HTTP {response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise PdserveError(f"the stream broke after {came} tokens: {event['error']['message']}")
                logprobs = event["choices"][0]["logprobs"]
                for _ in logprobs["tokens"] if logprobs else ():
                    came += 1
                    yield time.perf_counter()
        if came != count:
            raise PdserveError(f"{count} tokens were asked for, {came} came")

    async def metrics(self) -> Metrics:
        """One scrape."""
        return Metrics((await self._http.get("/metrics")).raise_for_status().text)

    async def idle(self) -> Metrics:
        """The first scrape in which no request is left anywhere. Raises PdserveError when that takes too long."""
        deadline, metrics = asyncio.get_running_loop().time() + IDLE_SECONDS, await self.metrics()
        while held := [name for name in HELD if metrics.total(name)]:
            if asyncio.get_running_loop().time() > deadline:
                raise PdserveError(f"{held} are above 0 after {IDLE_SECONDS:g} s")
            # another process's state makes no event here, so it is asked again
            await asyncio.sleep(ASK_AGAIN_SECONDS)
            metrics = await self.metrics()
        return metrics


@asynccontextmanager
async def serving(flags: Mapping[str, object], settings: Mapping[str, object]) -> AsyncIterator[Served]:
    """`pdserve up` with --flag value and --set key=value, on ports that the system chooses, ready. It is gone at the
    end, whatever happens. Raises StartupError with what it said."""
    arguments = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    settings = {"cluster.namespace": f"benchmark-{os.getpid()}", **settings}
    arguments += [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    with tempfile.TemporaryFile() as complaints:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("pdserve")),
            *("up", "--http-port", "0", "--grpc-port", "0", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,  # Ctrl-C ends the benchmark, which then ends the cluster in order
        )
        try:
            url = await _address(process)
            if url is None:
                complaints.seek(0)
                raise StartupError(f"pdserve up failed: {complaints.read().decode().strip()}")
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits, trust_env=False) as http:
                models = (await http.get("/v1/models")).raise_for_status().json()
                yield Served(http, models["data"][0]["id"])
        finally:
            await _stop(process)


async def _address(process: asyncio.subprocess.Process) -> str | None:
    """What it serves on; None when it has ended, or takes too long."""
    assert process.stdout is not None
    url = None
    try:
        async with asyncio.timeout(START_SECONDS):
            async for line in process.stdout:
                words = line.decode().split()
                if words[:1] == ["HTTP"]:
                    url = words[1]
                if words[:1] == ["-d"]:  # the last line of what it says when it is ready
                    return url
    except TimeoutError:
        return None
    return None


async def _stop(process: asyncio.subprocess.Process) -> None:
    """In order if it can. Its clients are gone, so nothing keeps it."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.communicate()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()

"""One user of an OpenAI server: sends a chat completion and times what streams back.

Called by loadgen/workload.py. It measures at the socket, as a client would, and must never raise for
what a server does: an error is a measurement too.
"""

import asyncio
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from contracts.errors import StartupError


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its user saw it; times in seconds.

    `ttft`: from sending to the first text, None without any. `gaps`: between successive pieces of text.
    `prompt_tokens` and `tokens` are the server's usage, else 0 and the number of pieces. `error` "": it
    ended as it should; else "http <status>", the server's error code, or what went wrong with the stream.
    """

    ttft: float | None
    gaps: tuple[float, ...]
    prompt_tokens: int
    tokens: int
    error: str

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first."""
        return sum(self.gaps) / (self.tokens - 1) if self.tokens > 1 and self.gaps else None


class LoadClient:
    """`http` has the server's base URL, without /v1, and may be shared by many users."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def complete(self, prompt: str, max_tokens: int, ignore_eos: bool) -> Sample:
        """Send `prompt` and read the whole answer, greedily sampled."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:  # not OpenAI's own, so never sent unasked
            body["ignore_eos"] = True
        reading = _Reading(asyncio.get_running_loop().time())
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    return reading.sample(f"http {response.status_code}")
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        reading.take(line.removeprefix("data:").strip(), asyncio.get_running_loop().time())
        except httpx.HTTPError as error:
            return reading.sample(type(error).__name__)
        except (ValueError, LookupError, TypeError, AttributeError):
            return reading.sample("malformed stream")
        return reading.sample(reading.error or ("" if reading.done else "stream cut"))


class _Reading:
    """What has been read of one stream that was asked for at `begun`."""

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._times: list[float] = []
        self._usage: dict[str, int] = {}
        self.done = False
        self.error = ""

    def take(self, data: str, now: float) -> None:
        """One event. Raises what malformed JSON raises."""
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"].get("code") or event["error"].get("type") or "error")
            return
        if any(choice["delta"].get("content") for choice in event["choices"]):
            self._times.append(now)
        self._usage = event.get("usage") or self._usage

    def sample(self, error: str) -> Sample:
        times = self._times
        return Sample(
            ttft=times[0] - self._begun if times else None,
            gaps=tuple(after - before for before, after in pairwise(times)),
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            tokens=self._usage.get("completion_tokens", len(times)),
            error=error,
        )


async def first_model(http: httpx.AsyncClient) -> str:
    """The first model that the server names. Raises StartupError when it names none."""
    try:
        response = await http.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise StartupError(f"cannot ask {http.base_url} for its models: {error or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise StartupError(f"{http.base_url} does not answer /v1/models as OpenAI does") from error

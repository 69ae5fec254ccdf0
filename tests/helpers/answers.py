"""Asks a served cluster through its public APIs, every way alike, and reads its metrics."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos.pdserve.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.helpers.model_cluster import IDLE_SECONDS, Served, idle
from tests.helpers.public_api import events_of

WAYS = ("whole", "stream", "grpc")
CHAT_WAYS = ("chat", "chat stream", "grpc chat")
_FINISH = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
_GRPC_STATUS = {400: grpc.StatusCode.INVALID_ARGUMENT, 500: grpc.StatusCode.INTERNAL}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a caller gets. `pieces`: the texts in the order in which they came; `raw`: the JSON object, the
    events of the stream, or the gRPC responses."""

    pieces: list[str]
    finish: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    raw: Any

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def token_ids(self) -> list[int]:
        """Only over gRPC."""
        return [token.id for response in self.raw for token in response.tokens]


async def ask(served: Served, way: str, prompt: list[int] | str, **fields: Any) -> Answer:
    """One request over HTTP ("whole", "stream"), as a chat ("chat", "chat stream"), or over gRPC ("grpc",
    "grpc chat"), which must succeed. `fields` have the same names everywhere."""
    if way.startswith("grpc"):
        return await _ask_grpc(served, generate_request(prompt, chat=way == "grpc chat", **fields))
    if way.endswith("stream"):
        fields = {"stream": True, "stream_options": {"include_usage": True}} | fields
    response = await post(served, prompt, chat=way.startswith("chat"), **fields)
    assert response.status_code == 200, response.text
    return from_events(response) if way.endswith("stream") else from_json(response)


async def post(served: Served, prompt: Any, *, chat: bool = False, **fields: Any) -> httpx.Response:
    """A request over HTTP, however it ends."""
    path, body = ("/v1/chat/completions", {"messages": _messages(prompt)}) if chat else ("/v1/completions", {})
    body = {"model": "m"} | (body if chat else {"prompt": prompt}) | fields
    return await served.client.post(path, content=orjson.dumps(body))


async def assert_refused(
    served: Served, prompt: Any, *, code: str, param: str | None, status: int = 400, **fields: Any
) -> None:
    """HTTP answers with a plain JSON error, streamed or not; gRPC with the same code. Chats are not asked."""
    for stream in (False, True):
        assert_error(await post(served, prompt, stream=stream, **fields), code=code, param=param, status=status)
    await assert_refused_over_grpc(served, prompt, code=code, status=status, **fields)


def assert_error(response: httpx.Response, *, code: str, param: str | None, status: int = 400) -> None:
    """A plain JSON error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error


async def assert_refused_over_grpc(served: Served, prompt: Any, *, code: str, status: int = 400, **fields: Any) -> None:
    """The status of gRPC that belongs to an HTTP status."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub(served).Generate(generate_request(prompt, **fields)).read()
    assert refused.value.code() is _GRPC_STATUS[status], refused.value
    assert dict(refused.value.trailing_metadata() or ())["pdserve-error-code"] == code


def from_json(response: httpx.Response) -> Answer:
    """Of a whole answer."""
    body = response.json()
    (choice,) = body["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer([text], choice["finish_reason"], *_usage(body["usage"]), body)


def from_events(response: httpx.Response) -> Answer:
    """Of a streamed answer that was whole, with its usage."""
    *chunks, usage, done = events_of(response.content)
    assert done == "[DONE]"
    assert usage["choices"] == []
    choices = [chunk["choices"][0] for chunk in chunks]
    pieces = [c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices]
    reasons = [choice["finish_reason"] for choice in choices]
    assert all(reason is None for reason in reasons[:-1])
    return Answer([piece for piece in pieces if piece], reasons[-1], *_usage(usage["usage"]), chunks)


def generate_request(prompt: list[int] | str, *, chat: bool = False, **fields: Any) -> inference_pb2.GenerateRequest:
    """The same for gRPC."""
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if chat:
        fields["chat"] = {"messages": _messages(prompt)}
    elif isinstance(prompt, str):
        fields["text"] = prompt
    else:
        fields["token_ids"] = {"ids": prompt}
    return inference_pb2.GenerateRequest(model="m", **fields)


def stub(served: Served) -> Any:
    """gRPC's Inference."""
    return inference_pb2_grpc.InferenceStub(served.channel)  # type: ignore[no-untyped-call]  # generated


async def _ask_grpc(served: Served, request: inference_pb2.GenerateRequest) -> Answer:
    responses = [response async for response in stub(served).Generate(request)]
    usage, reasons = responses[-1].usage, [response.finish_reason for response in responses]
    assert not any(reasons[:-1])
    return Answer(
        [response.text for response in responses if response.text],
        _FINISH[reasons[-1]],
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        responses,
    )


def _messages(prompt: Any) -> Any:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _usage(usage: dict[str, Any]) -> tuple[int, int, int]:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class Metrics:
    """One scrape of the whole cluster."""

    def __init__(self, exposition: str) -> None:
        families = text_string_to_metric_families(exposition)
        self._samples = [sample for family in families for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels, of which there must be some."""
        found = self.get(name, **labels)
        assert found is not None, f"no {name} with {labels}"
        return found

    def get(self, name: str, **labels: str) -> float | None:
        """The same, None when there are none."""
        found = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        return float(sum(found)) if found else None

    @property
    def workers(self) -> set[str]:
        """Whose samples are in it."""
        return {sample.labels["worker"] for sample in self._samples if "worker" in sample.labels}

    def labels(self, name: str) -> list[dict[str, str]]:
        """Those of every sample of this name."""
        return [sample.labels for sample in self._samples if sample.name == name]


async def scrape(served: Served) -> Metrics:
    """What /metrics says."""
    return Metrics((await served.client.get("/metrics")).text)


async def until(served: Served, condition: Callable[[Metrics], bool]) -> Metrics:
    """The first scrape for which the condition holds, within IDLE_SECONDS. One that lacks a worker, which the router
    does not wait for when the machine is busy, says nothing."""
    async with asyncio.timeout(IDLE_SECONDS):
        while True:
            metrics = await scrape(served)
            if served.cluster.workers.keys() <= metrics.workers and condition(metrics):
                return metrics


async def settled(served: Served) -> Metrics:
    """Nothing runs, waits or is held in the router and on any worker, and every audit agreed."""
    await idle(served.cluster)
    gauges = [
        ("pdserve_queue_requests", {}),
        ("pdserve_router_running", {}),
        ("pdserve_requests_running", {}),
        ("pdserve_requests_waiting", {}),
        ("pdserve_leases", {}),
        *(("pdserve_kv_blocks", {"state": state}) for state in ("used", "pinned", "reserved")),
    ]
    metrics = await until(served, lambda found: not any(found(name, **labels) for name, labels in gauges))
    assert metrics("pdserve_audit_failures_total") == 0
    return metrics

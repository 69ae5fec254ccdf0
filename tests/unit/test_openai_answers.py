"""The answers of the OpenAI routes: whole and streamed, logprobs, usage, errors; and the other routes."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from contracts.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    KvCapacityExceeded,
    Overloaded,
    PdserveError,
    WorkerLost,
)
from contracts.requests import FinishReason
from tests.helpers.public_api import (
    CONTEXT,
    MODEL,
    FakeService,
    answer,
    asgi_client,
    events_of,
    frontends,
    output,
    tiny_text,
)
from text.text_processor import TextProcessor

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": MODEL, "prompt": [7, 8]}
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return tiny_text(tmp_path_factory.mktemp("model"))


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService, text: TextProcessor) -> AsyncIterator[httpx.AsyncClient]:
    async with asgi_client(frontends(service, text)) as made:
        yield made


async def post(client: httpx.AsyncClient, kind: str, **changes: Any) -> httpx.Response:
    return await client.post(PATHS[kind], json=(CHAT if kind == "chat" else COMPLETION) | changes)


async def stream(client: httpx.AsyncClient, kind: str, **changes: Any) -> list[Any]:
    """The chunks of a streamed answer, without [DONE]."""
    response = await post(client, kind, stream=True, **changes)
    assert response.status_code == 200, response.text
    *chunks, done = events_of(response.content)
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    return chunks


async def test_whole_chat(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = answer("he", "llo", cached=3)
    made = (await post(client, "chat")).json()
    assert made.pop("id").startswith("chatcmpl-")
    assert made.pop("created") > 0
    assert made == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_whole_completion(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = [output(1, "a", "b"), output(3, "c", finish=FinishReason.LENGTH)]
    made = (await post(client, "completion")).json()
    assert made["object"] == "text_completion"
    assert made["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}]
    assert made["usage"]["completion_tokens"] == 3


async def test_streamed_chat(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = [output(1, ""), output(2, "he"), output(3, "l", "lo"), output(5, "", finish=FinishReason.STOP)]
    chunks = await stream(client, "chat")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "he"}, None),
        ({"content": "llo"}, None),
        ({}, "stop"),
    ]


async def test_streamed_completion(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = [output(1, ""), output(2, "he"), output(3, "llo", finish=FinishReason.LENGTH)]
    chunks = await stream(client, "completion")
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ("he", None),
        ("llo", None),
        ("", "length"),
    ]


@pytest.mark.parametrize("kind", PATHS)
async def test_stream_headers(client: httpx.AsyncClient, service: FakeService, kind: str) -> None:
    service.script = answer("x")
    response = await post(client, kind, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers


@pytest.mark.parametrize("kind", PATHS)
async def test_usage_in_a_stream(client: httpx.AsyncClient, service: FakeService, kind: str) -> None:
    service.script = answer("a", "b", cached=1)
    *others, last = await stream(client, kind, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == (await post(client, kind)).json()["usage"]
    assert all(chunk["choices"] and "usage" not in chunk for chunk in others)
    for options in ({"include_usage": False}, {}, None):
        assert all(chunk["choices"] for chunk in await stream(client, kind, stream_options=options))


@pytest.mark.parametrize("asked", [None, 0, 2])
async def test_chat_logprobs(
    client: httpx.AsyncClient, service: FakeService, text: TextProcessor, asked: int | None
) -> None:
    top = asked or 0
    service.script = [output(1, "", "ab", top=top), output(3, "", finish=FinishReason.STOP, top=top)]
    asked_for: dict[str, Any] = {"logprobs": True, "top_logprobs": asked}
    whole = (await post(client, "chat", **asked_for)).json()["choices"][0]["logprobs"]["content"]
    assert service.requests[0].sampling.logprobs == top
    assert [entry["token"] for entry in whole] == [text.tokenizer.token_text(i) for i in (10, 11, 10)]
    for entry in whole:
        assert entry["logprob"] == -0.5
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [alternative["logprob"] for alternative in entry["top_logprobs"]] == [-0.5, -1.5][:top]
    streamed = [
        entry
        for chunk in await stream(client, "chat", **asked_for)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole


@pytest.mark.parametrize("asked", [0, 3])
async def test_completion_logprobs(
    client: httpx.AsyncClient, service: FakeService, text: TextProcessor, asked: int
) -> None:
    service.script = [output(1, "", "ab", top=asked), output(3, "c", finish=FinishReason.STOP, top=asked)]
    names = [text.tokenizer.token_text(i) for i in (10, 11, 12)]
    whole = (await post(client, "completion", logprobs=asked)).json()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": [names[0], names[1], names[0]],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [dict(zip(names, (-0.5, -1.5, -9999.0), strict=True)) if asked else {}] * 3,
        "text_offset": [0, 0, 2],
    }
    joined: dict[str, list[Any]] = {name: [] for name in whole}
    for chunk in await stream(client, "completion", logprobs=asked):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == whole


async def test_no_logprobs_unless_asked(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = answer("a", top=2)
    assert (await post(client, "chat", logprobs=False)).json()["choices"][0]["logprobs"] is None
    assert (await post(client, "completion")).json()["choices"][0]["logprobs"] is None


ERRORS: list[tuple[PdserveError, int, str]] = [
    (EngineFailed("step failed"), 500, "server_error"),
    (KvCapacityExceeded("64 blocks", param="max_tokens"), 400, "invalid_request_error"),
    (Overloaded("queue is full", retry_after=3), 503, "overloaded_error"),
    (DeadlineExceeded("late"), 504, "timeout_error"),
    (WorkerLost("gone"), 503, "server_error"),
    (Cancelled("the router is draining"), 499, "cancelled_error"),
]


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("error", "status", "error_type"), ERRORS)
async def test_error_before_the_first_byte(
    client: httpx.AsyncClient,
    service: FakeService,
    *,
    kind: str,
    streamed: bool,
    error: PdserveError,
    status: int,
    error_type: str,
) -> None:
    service.script = [error]
    response = await post(client, kind, stream=streamed)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.headers.get("retry-after") == {503: str(error.retry_after or 1)}.get(status)
    assert response.json()["error"] == {
        "message": error.message,
        "type": error_type,
        "param": error.param,
        "code": error.code,
    }
    assert service.closed.is_set()


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("at", [1, 4])
async def test_error_after_the_first_byte(client: httpx.AsyncClient, service: FakeService, kind: str, at: int) -> None:
    service.script = [*answer(*"abcd")[:-1][:at], EngineFailed("step failed")]
    response = await post(client, kind, stream=True, stream_options={"include_usage": True})
    assert response.status_code == 200
    *chunks, failure, done = events_of(response.content)
    assert failure["error"]["code"] == "engine_failed"
    assert failure["error"]["type"] == "server_error"
    assert done == "[DONE]"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_error_after_the_last_token(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = [*answer("a"), EngineFailed("at the usage chunk")]
    *_, failure, done = events_of((await post(client, "chat", stream=True)).content)
    assert failure["error"]["code"] == "engine_failed"
    assert done == "[DONE]"


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_without_a_finish_reason_is_an_error(
    client: httpx.AsyncClient, service: FakeService, streamed: bool
) -> None:
    service.script = []
    assert (await post(client, "chat", stream=streamed)).status_code == 500
    service.script = [output(1, "a")]
    response = await post(client, "chat", stream=streamed)
    if streamed:
        assert events_of(response.content)[-2]["error"]["code"] == "internal_error"
    else:
        assert response.status_code == 500


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("before", [[], answer("a", "b")[:1]])
async def test_unexpected_error_is_logged_and_not_shown(
    client: httpx.AsyncClient,
    service: FakeService,
    streamed: bool,
    before: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.script = [*before, RuntimeError("private detail")]
    headers = {"X-Request-Id": "request-77"}
    response = await client.post(PATHS["chat"], json=CHAT | {"stream": streamed}, headers=headers)
    assert b"private" not in response.content
    assert b"Traceback" not in response.content
    if streamed and before:
        assert events_of(response.content)[-2]["error"]["code"] == "internal_error"
    else:
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "request-77" in record.message
    assert record.exc_info is not None
    assert "private detail" in str(record.exc_info[1])


async def test_traceparent(client: httpx.AsyncClient, service: FakeService) -> None:
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    bad = [
        "",
        "x",
        good[:-1],
        good.replace("00-0af", "ff-0af"),
        good.upper(),
        f"{good}-extra",
        "00-" + "0" * 32 + good[35:],
        good[:36] + "0" * 16 + "-01",
    ]
    service.script = answer("a")
    for value in (good, *bad):
        response = await client.post(PATHS["chat"], json=CHAT, headers={"traceparent": value})
        assert response.status_code == 200
    assert [request.traceparent for request in service.requests] == [good] + [""] * len(bad)


async def test_request_id(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = answer("a")
    twice = [await client.post(PATHS["chat"], json=CHAT, headers={"X-Request-Id": "mine"}) for _ in range(2)]
    assert [response.headers["x-request-id"] for response in twice] == ["mine", "mine"]
    assert twice[0].json()["id"] != twice[1].json()["id"]
    assert (await client.get("/health")).headers["x-request-id"]
    assert (await client.get("/no", headers={"X-Request-Id": "other"})).headers["x-request-id"] == "other"
    assert (await client.get("/health", headers={"X-Request-Id": "x" * 999})).headers["x-request-id"] != "x" * 999


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", CONTEXT)
    assert (await client.get(f"/v1/models/{MODEL}")).json() == card
    missing = await client.get("/v1/models/some/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_health_ready_metrics(client: httpx.AsyncClient, service: FakeService) -> None:
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 200
    service.is_ready = False
    response = await client.get("/ready")
    assert (response.status_code, response.json()) == (503, {"ready": False})
    assert response.headers["retry-after"] == "2"
    assert (await client.get("/health")).status_code == 200
    metrics = await client.get("/metrics")
    assert metrics.text == "pdserve_up 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
    ],
)
async def test_unknown_routes(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert path in error["message"]

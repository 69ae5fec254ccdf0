"""Every field of the OpenAI bodies: valid, at its bound, out of range, of the wrong type, null, absent."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from contracts.errors import NotReady
from contracts.requests import FinishReason
from tests.helpers.public_api import CONTEXT, MODEL, VOCABULARY, FakeService, answer, asgi_client, frontends, tiny_text
from text.text_processor import TextProcessor


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return tiny_text(tmp_path_factory.mktemp("model"))


@pytest.fixture
def service() -> FakeService:
    return FakeService(answer("hi", finish=FinishReason.LENGTH))


@pytest.fixture
async def client(service: FakeService, text: TextProcessor) -> AsyncIterator[httpx.AsyncClient]:
    async with asgi_client(frontends(service, text, body_bytes=100_000)) as made:
        yield made


PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


def body(kind: str, **changes: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if kind == "chat" else {"prompt": [7, 8]}
    return {"model": MODEL, **prompt, **changes}


async def post(client: httpx.AsyncClient, kind: str, **changes: Any) -> httpx.Response:
    return await client.post(PATHS[kind], json=body(kind, **changes))


def check_refused(response: httpx.Response, param: str | None, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    return error


SAMPLING_ACCEPTED = [
    ("temperature", [0, 1e-6, 0.0, 1, 2, 2.0, None]),
    ("top_p", [0, 1e-9, 0.5, 1, None]),
    ("top_k", [-1, 0, 1, 10**9, None]),
    ("seed", [0, 7, 2**63 - 1, None]),
    ("stop", ["x", ["x"], [], None, ["a"] * 16, "y" * 1024, ["y" * 256] * 16]),
    ("include_stop_str_in_output", [True, False, None]),
    ("stop_token_ids", [[], [0, VOCABULARY - 1], [1] * 128, None]),
    ("min_tokens", [0, 5, None]),
    ("ignore_eos", [True, False, None]),
    ("max_tokens", [1, 5, 10**6, None]),
    ("max_completion_tokens", [1, 5, 10**6, None]),
    ("stream", [False, None]),
    ("stream_options", [None]),
    ("n", [1, None]),
    ("best_of", [1, None]),
    ("echo", [False, None]),
    ("suffix", ["", None]),
    ("logit_bias", [{}, None]),
    ("presence_penalty", [0, 0.0, None]),
    ("frequency_penalty", [0, 0.0, None]),
    ("repetition_penalty", [1, 1.0, None]),
    ("min_p", [0, 0.0, None]),
    ("tools", [[], None]),
    ("tool_choice", ["none", None]),
    ("functions", [[], None]),
    ("response_format", [{"type": "text"}, None]),
    ("user", ["me", None]),
    ("metadata", [{"a": "b"}]),
    ("store", [True]),
    ("service_tier", ["auto"]),
    ("safety_identifier", ["x"]),
    ("prompt_cache_key", ["x"]),
    ("parallel_tool_calls", [True]),
]

SAMPLING_REFUSED = [
    ("temperature", [-0.1, 2.1, "1", True, [1]]),
    ("top_p", [-0.1, 1.01, "1", True]),
    ("top_k", [-2, 1.5, "1", True]),
    ("seed", [-1, 2**63, 1.5, "1", True]),
    ("stop", ["", [""], ["a", ""], [1], 5, ["a"] * 17, {"a": 1}, "y" * 1025, ["y" * 256] * 15 + ["y" * 257]]),
    ("include_stop_str_in_output", [1, "true"]),
    ("stop_token_ids", [[VOCABULARY], [-1], ["1"], [1.5], [True], 5, [1] * 129]),
    ("min_tokens", [-1, 1.5, "1", True, 10**6]),
    ("ignore_eos", [1, "true"]),
    ("max_tokens", [0, -1, 1.5, "8", True]),
    ("max_completion_tokens", [0, -1, 1.5, "8", True]),
    ("stream", [1, "true"]),
    ("n", [0, 2, True, "1", 1.5]),
    ("best_of", [2]),
    ("echo", [True, 0]),
    ("suffix", ["x"]),
    ("logit_bias", [{"1": 1}]),
    ("presence_penalty", [0.1, -2.01, True]),
    ("frequency_penalty", [2.01, "0"]),
    ("repetition_penalty", [0, 1.1]),
    ("min_p", [0.1, 2]),
    ("tools", [[{"type": "function"}]]),
    ("tool_choice", ["auto", "required"]),
    ("functions", [[{}]]),
    ("response_format", [{"type": "json_object"}, {"type": "text", "schema": {}}]),
    ("model", [None, 5]),
    ("no_such_field", [None, 1]),
]


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(("field", "values"), SAMPLING_ACCEPTED)
async def test_accepted(client: httpx.AsyncClient, kind: str, field: str, values: list[Any]) -> None:
    for value in values:
        response = await post(client, kind, **{field: value})
        assert response.status_code == 200, (value, response.text)


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "values"), SAMPLING_REFUSED)
async def test_refused(
    client: httpx.AsyncClient, service: FakeService, *, kind: str, stream: bool, field: str, values: list[Any]
) -> None:
    for value in values:
        check_refused(await post(client, kind, **({"stream": stream} | {field: value})), field)
    assert not service.requests


@pytest.mark.parametrize("field", ["temperature", "top_p", "seed", "max_tokens", "min_p", "presence_penalty"])
@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e400"])
async def test_no_number(client: httpx.AsyncClient, field: str, literal: bytes) -> None:
    raw = orjson.dumps(body("completion"))[:-1] + b',"' + field.encode() + b'":' + literal + b"}"
    check_refused(await client.post(PATHS["completion"], content=raw), None)


async def test_values_reach_the_service(client: httpx.AsyncClient, service: FakeService) -> None:
    response = await post(
        client,
        "completion",
        temperature=0.5,
        top_p=0,
        top_k=10**9,
        seed=9,
        stop="x",
        include_stop_str_in_output=True,
        stop_token_ids=[3],
        min_tokens=2,
        ignore_eos=True,
        max_tokens=9,
        max_completion_tokens=4,
        logprobs=0,
    )
    assert response.status_code == 200
    (request,) = service.requests
    assert request.prompt_ids == (7, 8)
    assert 590 < request.timeout <= 600  # what is left of it
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0, VOCABULARY, 9)
    assert (sampling.stop, sampling.include_stop, sampling.stop_token_ids) == (("x",), True, (3,))
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.max_tokens, sampling.logprobs) == (2, True, 4, 0)


@pytest.mark.parametrize("kind", PATHS)
async def test_defaults(client: httpx.AsyncClient, service: FakeService, kind: str) -> None:
    await post(client, kind)
    await post(client, kind, max_tokens=None)
    first, second = service.requests
    prompt = len(first.prompt_ids)
    expected = service.limit - prompt if kind == "chat" else 16  # type: ignore[operator] # an int here
    for request in (first, second):
        sampling = request.sampling
        assert sampling.max_tokens == expected
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
        assert (sampling.min_tokens, sampling.stop, sampling.logprobs) == (0, (), None)
    assert first.sampling.seed != second.sampling.seed


async def test_default_is_cut_to_the_pools_and_an_explicit_limit_to_the_context(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.limit = 10
    await post(client, "completion", prompt=[1] * 4)
    await post(client, "completion", prompt=[1] * 20)
    await post(client, "completion", prompt=[1] * 4, max_tokens=10**6)
    assert [request.sampling.max_tokens for request in service.requests] == [6, 1, CONTEXT - 4]


async def test_min_tokens_must_fit_the_limit(client: httpx.AsyncClient, service: FakeService) -> None:
    assert (await post(client, "completion", max_tokens=3, min_tokens=3)).status_code == 200
    check_refused(await post(client, "completion", max_tokens=3, min_tokens=4), "min_tokens")
    check_refused(await post(client, "completion", min_tokens=17), "min_tokens")
    assert (await post(client, "completion", max_tokens=999, min_tokens=999)).status_code == 200
    assert service.requests[-1].sampling.min_tokens == CONTEXT - 2


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_around_the_context(client: httpx.AsyncClient, service: FakeService, stream: bool) -> None:
    fits = await post(client, "completion", prompt=[7] * (CONTEXT - 1), max_tokens=5, stream=stream)
    assert fits.status_code == 200
    assert service.requests[0].sampling.max_tokens == 1
    for length in (CONTEXT, CONTEXT + 1):
        response = await post(client, "completion", prompt=[7] * length, stream=stream)
        error = check_refused(response, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]
        assert str(length) in error["message"]


@pytest.mark.parametrize("kind", PATHS)
async def test_huge_text_is_refused_without_tokenising(
    client: httpx.AsyncClient, text: TextProcessor, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(text.template, "prompt_ids", never)
    monkeypatch.setattr(text.template, "completion_ids", never)
    huge = "x" * 50_000
    changes: dict[str, Any] = {"messages": [{"role": "user", "content": huge}]} if kind == "chat" else {"prompt": huge}
    error = check_refused(await post(client, kind, **changes), "messages" if kind == "chat" else "prompt")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("a", 2),  # BOS and one byte
        ("", 1),  # BOS
        ([""], 1),
        (["ab"], 3),
        ([1, 2], 2),
        ([[1, 2]], 2),
        ([0, VOCABULARY - 1], 2),
    ],
)
async def test_prompts(client: httpx.AsyncClient, service: FakeService, prompt: Any, ids: int) -> None:
    response = await post(client, "completion", prompt=prompt)
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] == ids
    assert len(service.requests[0].prompt_ids) == ids


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], None, 5, ["a", ""], ["a", "b"], [[1], [2]], [1, "a"], [1.5], [True], [VOCABULARY], [-1], [2**60], {}],
)
async def test_refused_prompts(client: httpx.AsyncClient, prompt: Any) -> None:
    check_refused(await post(client, "completion", prompt=prompt), "prompt")


async def test_empty_prompt_without_bos(tmp_path: Any) -> None:
    made = frontends(FakeService(answer("x")), tiny_text(tmp_path, bos=False))
    async with asgi_client(made) as client:
        check_refused(await post(client, "completion", prompt=""), "prompt")


async def test_missing_prompts(client: httpx.AsyncClient) -> None:
    for kind, field in (("chat", "messages"), ("completion", "prompt")):
        check_refused(await client.post(PATHS[kind], json={"model": MODEL}), field)


async def test_chat_contents(client: httpx.AsyncClient, service: FakeService, text: TextProcessor) -> None:
    messages = [
        {"role": "developer", "content": "d", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    assert (await post(client, "chat", messages=messages)).status_code == 200
    expected = text.tokenizer.encode("system:d\nuser:a\nb\nassistant:\ntool:t\n>", control_tokens=False)
    assert list(service.requests[0].prompt_ids) == expected


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [5],
        [{}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": "x", "unknown": 1}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
        [{"role": "user", "content": "ok"}, {"role": "user"}],
    ],
)
async def test_refused_messages(client: httpx.AsyncClient, service: FakeService, messages: Any) -> None:
    check_refused(await post(client, "chat", messages=messages), "messages")
    assert not service.requests


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": "3"}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    ],
)
async def test_refused_chat_logprobs(client: httpx.AsyncClient, changes: dict[str, Any], param: str) -> None:
    check_refused(await post(client, "chat", **changes), param)


@pytest.mark.parametrize("logprobs", [-1, 21, True, "1", 1.5])
async def test_refused_completion_logprobs(client: httpx.AsyncClient, logprobs: Any) -> None:
    check_refused(await post(client, "completion", logprobs=logprobs), "logprobs")


async def test_fields_of_the_other_route(client: httpx.AsyncClient) -> None:
    check_refused(await post(client, "chat", prompt="x"), "prompt")
    check_refused(await post(client, "completion", messages=[]), "messages")
    check_refused(await post(client, "completion", top_logprobs=1), "top_logprobs")


@pytest.mark.parametrize("kind", PATHS)
async def test_stream_options(client: httpx.AsyncClient, kind: str) -> None:
    check_refused(await post(client, kind, stream_options={"include_usage": True}), "stream_options")
    check_refused(await post(client, kind, stream_options={}, stream=False), "stream_options")
    check_refused(
        await post(client, kind, stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"
    )
    check_refused(await post(client, kind, stream=True, stream_options={"other": 1}), "stream_options.other")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b'{"model":"\\ud800"}', b"[" * 5000])
async def test_bad_json(client: httpx.AsyncClient, raw: bytes) -> None:
    check_refused(await client.post(PATHS["chat"], content=raw), None)


async def test_body_over_the_limit(client: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 1000

    error = check_refused(await client.post(PATHS["chat"], content=b" " * 100_001), None, 413)
    assert error["code"] == "request_too_large"
    check_refused(await client.post(PATHS["chat"], content=pieces()), None, 413)


@pytest.mark.parametrize("kind", PATHS)
async def test_wrong_model(client: httpx.AsyncClient, kind: str) -> None:
    error = check_refused(await post(client, kind, model="other" * 1000), "model", 404)
    assert error["code"] == "model_not_found"
    assert len(error["message"]) < 200


async def test_default_limit_needs_workers(client: httpx.AsyncClient, service: FakeService) -> None:
    service.limit = NotReady("no decode worker", retry_after=2)
    response = await post(client, "completion")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.json()["error"]["type"] == "overloaded_error"

"""The gRPC frontend through a real channel."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.errors import EngineFailed, Overloaded, WorkerLost
from contracts.requests import FinishReason
from protos.pdserve.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.helpers.public_api import CONTEXT, MODEL, VOCABULARY, FakeService, answer, frontends, output, tiny_text
from text.text_processor import TextProcessor

Request = inference_pb2.GenerateRequest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return tiny_text(tmp_path_factory.mktemp("model"))


@pytest.fixture
def service() -> FakeService:
    return FakeService(answer("hi", finish=FinishReason.LENGTH))


@pytest.fixture
async def channel(service: FakeService, text: TextProcessor) -> AsyncIterator[grpc.aio.Channel]:
    made = frontends(service, text, slow_client_seconds=5)
    ports = await made.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}") as opened:
        yield opened
    await made.stop(0)


def generate(channel: grpc.aio.Channel, request: Request, **call: Any) -> Any:
    return inference_pb2_grpc.InferenceStub(channel).Generate(request, **call)  # type: ignore[no-untyped-call] # generated


def ids(*tokens: int, **fields: Any) -> Request:
    return Request(model=MODEL, token_ids=inference_pb2.TokenIds(ids=tokens), **fields)


async def refused(channel: grpc.aio.Channel, request: Request, **call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(channel, request, **call).read()
    return caught.value


def code_of(error: grpc.aio.AioRpcError) -> Any:
    return dict(error.trailing_metadata())["pdserve-error-code"]


async def test_answer(channel: grpc.aio.Channel, service: FakeService) -> None:
    service.script = [
        output(1, "", "he", top=2, cached=4),
        output(3, "llo", finish=FinishReason.STOP, top=2, cached=4),
    ]
    first, last = [response async for response in generate(channel, ids(7, 8, logprobs=2))]
    assert (first.text, last.text) == ("he", "llo")
    assert [(token.id, token.text, token.logprob) for token in first.tokens] == [(10, "", -0.5), (11, "he", -0.5)]
    assert [(best.token_id, best.logprob) for best in first.tokens[0].top] == [(10, -0.5), (11, -1.5)]
    assert first.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
    assert not first.HasField("usage")
    assert last.finish_reason == common_pb2.FINISH_REASON_STOP
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (2, 3, 4)


async def test_values_reach_the_service(channel: grpc.aio.Channel, service: FakeService) -> None:
    request = ids(
        7,
        max_tokens=9,
        temperature=0,
        top_p=0.25,
        top_k=3,
        min_tokens=2,
        seed=5,
        stop=["x"],
        include_stop_str_in_output=True,
        stop_token_ids=[3],
        ignore_eos=True,
        logprobs=0,
    )
    span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    (response,) = [r async for r in generate(channel, request, metadata=(("traceparent", span),))]
    assert not response.tokens[0].HasField("logprob")
    (made,) = service.requests
    assert (made.prompt_ids, made.traceparent) == ((7,), span)
    assert 590 < made.timeout <= 600  # what is left of it
    sampling = made.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0, 0.25, 3)
    assert (sampling.min_tokens, sampling.seed, sampling.stop, sampling.include_stop) == (2, 5, ("x",), True)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs) == ((3,), True, 0)


async def test_prompts_and_defaults(channel: grpc.aio.Channel, service: FakeService, text: TextProcessor) -> None:
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    for request in (Request(text="ab"), Request(chat=chat), ids(7)):
        assert [r async for r in generate(channel, request, timeout=100)]
    raw, conversation, tokens = service.requests
    assert list(raw.prompt_ids) == text.template.completion_ids("ab")
    assert list(conversation.prompt_ids) == text.template.prompt_ids([{"role": "user", "content": "hi"}])
    limits = [request.sampling.max_tokens for request in (raw, conversation, tokens)]
    assert limits == [16, 200 - len(conversation.prompt_ids), 16]
    assert all(0 < request.timeout < 110 for request in service.requests)


@pytest.mark.parametrize(
    "request_",
    [
        Request(model=MODEL),
        ids(),
        ids(VOCABULARY),
        ids(7, max_tokens=0),
        ids(7, max_tokens=-1),
        ids(7, temperature=float("nan")),
        ids(7, temperature=2.1),
        ids(7, top_p=1.1),
        ids(7, top_k=-2),
        ids(7, seed=-1),
        ids(7, min_tokens=-1),
        ids(7, min_tokens=2, max_tokens=1),
        ids(7, stop=[""]),
        ids(7, stop=["a"] * 17),
        ids(7, stop=["a" * 1025]),
        ids(7, stop=["a" * 257] * 16),
        ids(7, stop_token_ids=[1] * 129),
        ids(7, stop_token_ids=[VOCABULARY]),
        ids(7, logprobs=-1),
        ids(7, logprobs=21),
        Request(chat=inference_pb2.ChatMessages()),
        Request(chat=inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="robot", content="x")])),
        Request(chat=inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user")] * 4097)),
    ],
)
async def test_refused(channel: grpc.aio.Channel, service: FakeService, request_: Request) -> None:
    error = await refused(channel, request_)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(error) == "invalid_request"
    assert error.details()
    assert not service.requests


async def test_too_long_and_too_large(channel: grpc.aio.Channel) -> None:
    for length in (CONTEXT, 1_000_000):
        error = await refused(channel, ids(*[7] * length))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert code_of(error) == "context_length_exceeded"
        assert str(length) in (error.details() or "")
    error = await refused(channel, Request(text="x" * (9 << 20)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(error) == "request_too_large"


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x12\x02\xff\xfe"])
async def test_bytes_that_are_no_request(data: bytes, channel: grpc.aio.Channel, service: FakeService) -> None:
    method: Any = channel.unary_stream("/pdserve.v1.Inference/Generate")
    call = method(data)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call.read()
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.value.details() == "the message is not a GenerateRequest"
    assert code_of(refusal.value) == "invalid_request"


async def test_errors(channel: grpc.aio.Channel, service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    error = await refused(channel, Request(model="other", text="x"))
    assert (error.code(), code_of(error)) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
    service.script = [Overloaded("queue is full", retry_after=7)]
    error = await refused(channel, ids(7))
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "queue is full")
    assert dict(error.trailing_metadata())["retry-after"] == "7"
    service.script = [WorkerLost("gone")]
    error = await refused(channel, ids(7))
    assert dict(error.trailing_metadata())["retry-after"] == "1"
    service.script = [RuntimeError("private detail")]
    error = await refused(channel, ids(7))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert "private detail" in caplog.text


async def test_error_after_tokens(channel: grpc.aio.Channel, service: FakeService) -> None:
    service.script = [output(1, "a"), EngineFailed("step failed")]
    call = generate(channel, ids(7))
    assert (await call.read()).text == "a"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    service.script = [output(1, "a")]
    call = generate(channel, ids(7))
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError, match="without a finish reason"):
        await call.read()


@pytest.mark.parametrize("steps", [0, 1])
async def test_cancel(channel: grpc.aio.Channel, service: FakeService, steps: int) -> None:
    service.script = [*answer("a", "b")[:steps], asyncio.Event()]
    call = generate(channel, ids(7))
    if steps:
        await call.read()
    async with asyncio.timeout(10):
        await service.started.wait()
        call.cancel()
        await service.closed.wait()
    assert await call.code() == grpc.StatusCode.CANCELLED


async def test_deadline(channel: grpc.aio.Channel, service: FakeService) -> None:
    service.script = [asyncio.Event()]
    error = await refused(channel, ids(7), timeout=0.2)
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(10):
        await service.closed.wait()
    assert service.requests[0].timeout < 1


async def test_health_follows_readiness(channel: grpc.aio.Channel, service: FakeService) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    states = health_pb2.HealthCheckResponse
    for is_ready, state in ((True, states.SERVING), (False, states.NOT_SERVING), (True, states.SERVING)):
        service.is_ready = is_ready
        for name in ("", "pdserve.v1.Inference"):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == state
        assert (await stub.List(health_pb2.HealthListRequest())).statuses[""].status == state
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_watched_health_follows_readiness(
    channel: grpc.aio.Channel, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.grpc_frontend._WATCH_SECONDS", 0.01)
    stub = health_pb2_grpc.HealthStub(channel)
    states = health_pb2.HealthCheckResponse
    async with asyncio.timeout(10):
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        for is_ready, state in ((True, states.SERVING), (False, states.NOT_SERVING), (True, states.SERVING)):
            service.is_ready = is_ready
            assert (await watch.read()).status == state
        watch.cancel()
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="other"))
        assert (await unknown.read()).status == states.SERVICE_UNKNOWN
        unknown.cancel()


async def test_stop_ends_running_calls(text: TextProcessor) -> None:
    service = FakeService([asyncio.Event()])
    made = frontends(service, text)
    ports = await made.start()
    async with asyncio.timeout(10), grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        call = generate(channel, ids(7))
        await service.started.wait()
        await made.stop(0)
        await service.closed.wait()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()

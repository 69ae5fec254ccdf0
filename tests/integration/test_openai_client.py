"""The real openai client, synchronous and asynchronous, against the real HTTP server."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from contracts.errors import EngineFailed, Overloaded
from tests.helpers.public_api import MODEL, FakeService, answer, frontends, output, tiny_text
from text.text_processor import TextProcessor

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return tiny_text(tmp_path_factory.mktemp("model"))


@pytest.fixture
def service() -> FakeService:
    return FakeService(answer("he", "llo", cached=1, top=2))


@pytest.fixture
async def url(service: FakeService, text: TextProcessor) -> AsyncIterator[str]:
    made = frontends(service, text)
    ports = await made.start()
    yield f"http://127.0.0.1:{ports.http}/v1"
    await made.stop(0)


async def test_asynchronous(url: str, service: FakeService) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
        assert chat.choices[0].message.content == "hello"
        assert chat.choices[0].finish_reason == "stop"
        assert chat.choices[0].logprobs is not None
        assert len(chat.choices[0].logprobs.content or []) == 2
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 1

        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
        assert chunks[-1].usage == chat.usage

        completion = await client.completions.create(model=MODEL, prompt="x", logprobs=2)
        assert completion.choices[0].text == "hello"
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.text_offset == [0, 2]
        pieces = [piece async for piece in await client.completions.create(model=MODEL, prompt="x", stream=True)]
        assert "".join(piece.choices[0].text for piece in pieces) == "hello"

        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors(url: str, service: FakeService) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2)
        assert refused.value.param == "n"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        service.script = [Overloaded("queue is full", retry_after=1)]
        with pytest.raises(openai.InternalServerError, match="queue is full") as full:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        assert full.value.response.headers["retry-after"] == "1"
        service.script = [output(1, "a"), EngineFailed("step failed")]
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="step failed"):
            [chunk async for chunk in stream]


async def test_a_stream_that_is_closed_early_ends_the_request(url: str, service: FakeService) -> None:
    service.script = [output(1, "a"), asyncio.Event()]
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client, asyncio.timeout(10):
        async with await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:
            await anext(aiter(stream))
        await service.closed.wait()


async def test_synchronous(url: str) -> None:
    def talk() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)
            stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

    assert await asyncio.to_thread(talk) == ("hello", "hello")

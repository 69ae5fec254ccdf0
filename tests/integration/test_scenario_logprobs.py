"""Log-probabilities in each API's own shape, one entry a token, the first one included; and usage chunks."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.answers import CHAT_WAYS, WAYS, Answer, ask, assert_error, post, settled
from tests.helpers.checkpoints import START, greedy_prompts, make_script_llama
from tests.helpers.model_cluster import model_config, served_cluster
from tests.helpers.public_api import events_of

TOKENS = 9


def choices(answer: Answer) -> list[dict[str, Any]]:
    """The choice of a whole answer, or of every chunk of a streamed one."""
    return [chunk["choices"][0] for chunk in (answer.raw if isinstance(answer.raw, list) else [answer.raw])]


def chat_entries(answer: Answer) -> list[dict[str, Any]]:
    found = [choice["logprobs"] for choice in choices(answer)]
    return [entry for logprobs in found if logprobs is not None for entry in logprobs["content"]]


def completion_columns(answer: Answer) -> dict[str, list[Any]]:
    found = [choice["logprobs"] for choice in choices(answer) if choice["logprobs"] is not None]
    assert all(len({len(column) for column in logprobs.values()}) == 1 for logprobs in found)
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for logprobs in found for value in logprobs[name]] for name in names}


@pytest.fixture
async def expected(noise_llama: Path) -> dict[str, Any]:
    """The responses' tokens of an aggregated worker over gRPC, for a raw prompt and for a chat."""
    async with served_cluster(model_config(noise_llama, aggregated=True)) as served:
        answers = {
            way: await ask(served, way, prompt, max_tokens=TOKENS, temperature=0, logprobs=3)
            for way, prompt in (("grpc", greedy_prompts()[9]), ("grpc chat", "hello"))
        }
    return {way: [token for response in answer.raw for token in response.tokens] for way, answer in answers.items()}


async def test_completions(noise_llama: Path, expected: dict[str, Any]) -> None:
    tokens = expected["grpc"]
    async with served_cluster(model_config(noise_llama)) as served:
        fields: dict[str, Any]
        for way in ("whole", "stream"):
            for count in (0, 1, 3, 6):
                answer = await ask(served, way, greedy_prompts()[9], max_tokens=TOKENS, temperature=0, logprobs=count)
                columns = completion_columns(answer)
                assert columns["token_logprobs"] == pytest.approx([token.logprob for token in tokens], abs=1e-5)
                assert all(logprob <= 0 for logprob in columns["token_logprobs"])
                assert all(len(top) <= count for top in columns["top_logprobs"])
                assert [bool(top) for top in columns["top_logprobs"]] == [count > 0] * TOKENS
                lengths = [len(token.text) for token in tokens]
                assert columns["text_offset"] == [sum(lengths[:index]) for index in range(TOKENS)]
                assert columns["tokens"] == [served.text.tokenizer.token_text(token.id) for token in tokens]
            for fields in ({"logprobs": None}, {}):
                answer = await ask(served, way, greedy_prompts()[9], max_tokens=TOKENS, temperature=0, **fields)
                assert all(choice["logprobs"] is None for choice in choices(answer))
        for wrong in (-1, 21):
            assert_error(await post(served, [START], logprobs=wrong), code="invalid_request", param="logprobs")
        await settled(served)


async def test_chats(noise_llama: Path, expected: dict[str, Any]) -> None:
    tokens = expected["grpc chat"]
    async with served_cluster(model_config(noise_llama)) as served:
        fields: dict[str, Any]
        for way in ("chat", "chat stream"):
            for fields, count in (
                ({}, 0),
                ({"top_logprobs": None}, 0),
                ({"top_logprobs": 0}, 0),
                ({"top_logprobs": 3}, 3),
                ({"top_logprobs": 20}, 20),
            ):
                answer = await ask(served, way, "hello", max_tokens=TOKENS, temperature=0, logprobs=True, **fields)
                entries = chat_entries(answer)
                assert [entry["logprob"] for entry in entries] == pytest.approx([t.logprob for t in tokens], abs=1e-5)
                for entry, token in zip(entries, tokens, strict=True):
                    assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
                    assert bytes(entry["bytes"]) == served.text.tokenizer.token_bytes(token.id)
                    assert len(entry["top_logprobs"]) == count
                    assert all(set(top) == {"token", "logprob", "bytes"} for top in entry["top_logprobs"])
                    if count:
                        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
                        ranked = [top["logprob"] for top in entry["top_logprobs"]]
                        assert ranked == sorted(ranked, reverse=True)
            for fields in ({}, {"logprobs": False}, {"logprobs": None}):
                answer = await ask(served, way, "hello", max_tokens=TOKENS, temperature=0, **fields)
                assert all(choice["logprobs"] is None for choice in choices(answer))
        for fields, param in (
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"logprobs": 3}, "logprobs"),
        ):
            assert_error(await post(served, "hello", chat=True, **fields), code="invalid_request", param=param)
        await settled(served)


async def test_usage_chunks(tmp_path: Path) -> None:
    make_script_llama(tmp_path, [b"a", b"b", b"c"])
    async with served_cluster(model_config(tmp_path)) as served:
        totals = {
            way: (await ask(served, way, [START] if way in WAYS else "hi", max_tokens=9, temperature=0))
            for way in WAYS + CHAT_WAYS
        }
        for one, other in (("whole", "stream"), ("whole", "grpc"), ("chat", "chat stream"), ("chat", "grpc chat")):
            mine, theirs = totals[one], totals[other]
            assert (mine.prompt_tokens, mine.completion_tokens) == (theirs.prompt_tokens, theirs.completion_tokens)
            assert (mine.completion_tokens, mine.text) == (4, theirs.text)
        for chat in (False, True):
            prompt: Any = "hi" if chat else [START]
            for fields in ({"stream_options": {"include_usage": False}}, {}, {"stream_options": None}):
                response = await post(served, prompt, chat=chat, stream=True, **fields)
                *chunks, done = events_of(response.content)
                assert done == "[DONE]"
                assert all(chunk.get("usage") is None and len(chunk["choices"]) == 1 for chunk in chunks)
                assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
            for stream in (False, None):
                response = await post(served, prompt, chat=chat, stream=stream, stream_options={"include_usage": True})
                assert_error(response, code="invalid_request", param="stream_options")
            async with served.client.stream(
                "POST",
                "/v1/chat/completions" if chat else "/v1/completions",
                json={"model": "m", "max_tokens": 2000, "stream": True, "stream_options": {"include_usage": True}}
                | ({"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": prompt})
                | {"ignore_eos": True},
            ) as response:
                await anext(response.aiter_bytes())  # and goes away
            await settled(served)

"""An engine that fails never looks like success: not before the first token, nor behind it, nor at the end."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from router.http.openai_format import ChatFormat, CompletionFormat
from tests.helpers.answers import ask, assert_error, assert_refused_over_grpc, generate_request, post, settled, stub
from tests.helpers.checkpoints import START, make_script_llama
from tests.helpers.model_cluster import Served, model_config, served_cluster
from tests.helpers.public_api import events_of
from tests.helpers.steps import Steps

SCRIPT = [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_script_llama(tmp_path, SCRIPT)
    return tmp_path


async def assert_whole(served: Served) -> None:
    """The next request gets everything, and nothing is left of those that failed."""
    assert (await ask(served, "whole", [START], max_tokens=20, temperature=0)).text == "abcdefg"
    await settled(served)


def assert_broken_off(content: bytes, text: str, code: str) -> None:
    """Events of `text`, then the error, then [DONE], and no finish reason."""
    *chunks, error, done = events_of(content)
    assert done == "[DONE]"
    assert set(error) == {"error"}
    assert {"message", "type", "code"} <= set(error["error"])
    assert error["error"]["code"] == code
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices) == text
    assert all(choice["finish_reason"] is None for choice in choices)


@pytest.mark.parametrize("transport", ["memory", "grpc"])
async def test_before_the_first_token(transport: str, model: Path) -> None:
    async with served_cluster(model_config(model, transport=transport)) as served:
        for chat in (False, True):
            for stream in (False, True):
                Steps(served.cluster, "prefill-0", fail=1)
                prompt: Any = "hi" if chat else [START]
                response = await post(served, prompt, chat=chat, max_tokens=20, stream=stream)
                assert_error(response, code="engine_failed", param=None, status=500)
                await settled(served)
        Steps(served.cluster, "prefill-0", fail=1)
        await assert_refused_over_grpc(served, [START], code="engine_failed", status=500, max_tokens=20)
        await assert_whole(served)


@pytest.mark.parametrize("topology", [{}, {"aggregated": True}, {"transport": "grpc"}])
async def test_at_the_fifth_token(topology: dict[str, Any], model: Path) -> None:
    """The engine's step that would draw it fails."""
    step = 5 if "aggregated" in topology else 4
    fields: dict[str, Any] = {"max_tokens": 20, "temperature": 0}
    async with served_cluster(model_config(model, **topology)) as served:
        for chat in (False, True):
            prompt: Any = "hi" if chat else [START]
            Steps(served.cluster, "decode-0", fail=step)
            streamed = await post(served, prompt, chat=chat, stream=True, **fields)
            assert streamed.status_code == 200
            assert_broken_off(streamed.content, "abcd", "engine_failed")
            Steps(served.cluster, "decode-0", fail=step)
            assert_error(await post(served, prompt, chat=chat, **fields), code="engine_failed", param=None, status=500)
        Steps(served.cluster, "decode-0", fail=step)
        call = stub(served).Generate(generate_request([START], **fields))
        for text in "abcd":
            response = await call.read()
            assert (response.text, response.finish_reason) == (text, 0)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        await assert_whole(served)


@pytest.mark.parametrize("chat", [False, True])
async def test_at_the_usage_chunk(chat: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of our own, where only usage and the end are left to be said."""

    def fail(*_: object) -> bytes:
        raise ZeroDivisionError

    prompt: Any = "hi" if chat else [START]
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    async with served_cluster(model_config(model)) as served:
        with monkeypatch.context() as broken:
            broken.setattr(ChatFormat if chat else CompletionFormat, "usage", fail)
            response = await post(served, prompt, chat=chat, max_tokens=20, **fields)
        *chunks, error, done = events_of(response.content)
        assert done == "[DONE]"
        assert (error["error"]["code"], error["error"]["message"]) == ("internal_error", "internal error")
        assert all(chunk["choices"] for chunk in chunks)
        await assert_whole(served)


async def test_bad_fields_with_stream(model: Path) -> None:
    async with served_cluster(model_config(model)) as served:
        for chat in (False, True):
            for field in ("n", "best_of", "echo", "logit_bias", "nonsense"):
                prompt: Any = "hi" if chat else [START]
                response = await post(served, prompt, chat=chat, stream=True, **{field: 0 if field == "n" else 7})
                assert_error(response, code="invalid_request", param=field)
            response = await post(served, prompt, chat=chat, stream=True, model="other")
            assert_error(response, code="model_not_found", param="model", status=404)
        response = await served.client.post("/v1/completions", content=b'{"model": "m", "stream": true,')
        assert_error(response, code="invalid_request", param=None)
        await assert_whole(served)

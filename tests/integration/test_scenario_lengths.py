"""Prompts of no tokens, as long as the context, and larger than the KV pools: answered at once, others go on."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from contracts.config import Config
from tests.helpers.answers import (
    CHAT_WAYS,
    WAYS,
    ask,
    assert_error,
    assert_refused,
    assert_refused_over_grpc,
    post,
    scrape,
    settled,
)
from tests.helpers.checkpoints import START, make_script_llama
from tests.helpers.model_cluster import model_config, served_cluster

CONTEXT, BLOCK, BLOCKS = 64, 16, 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Says "ok", then goes on for ever."""
    make_script_llama(tmp_path, [b"ok"], "filler")
    return tmp_path


@pytest.mark.parametrize("limited_by", ["model", "configuration"])
async def test_prompts_as_long_as_the_context(limited_by: str, tmp_path: Path) -> None:
    make_script_llama(tmp_path, [b"ok"], "filler", max_context=CONTEXT if limited_by == "model" else 2048)
    config = model_config(tmp_path)
    if limited_by == "configuration":
        config = replace(config, model=replace(config.model, max_context=CONTEXT))
    async with served_cluster(config) as served:
        for way in WAYS:
            for limit in (1, 2, 50):
                answer = await ask(served, way, [START] * (CONTEXT - 1), max_tokens=limit)
                assert (answer.completion_tokens, answer.finish) == (1, "length")
                assert answer.text == "ok"
            assert (await ask(served, way, [START] * (CONTEXT - 3), max_tokens=50)).completion_tokens == 3
        before = await scrape(served)
        for length in (CONTEXT, CONTEXT + 1, 40 * CONTEXT):
            for prompt in ([START] * length, "x" * length):
                refused: dict[str, Any] = {"code": "context_length_exceeded", "param": "prompt"}
                await assert_refused(served, prompt, **refused)
                await assert_refused(served, prompt, **refused, max_tokens=1)
            for stream in (False, True):
                response = await post(served, "x" * length, chat=True, stream=stream)
                assert_error(response, code="context_length_exceeded", param="messages")
        after = await settled(served)
        for name in ("pdserve_prefill_tokens_total", "pdserve_first_tokens_total", "pdserve_queue_seconds_count"):
            assert after(name) == before(name)
        assert (await ask(served, "whole", [START], max_tokens=1)).text == "ok"


def too_large(aggregated: bool) -> list[tuple[int, dict[str, Any], str]]:
    """Prompt lengths with the limits that no pool can hold, and the parameter that is to blame."""
    pool = BLOCKS * BLOCK
    return [
        (pool + BLOCK - 3, {"max_tokens": 1}, "prompt"),
        (pool + BLOCK - 3, {"max_tokens": 20}, "prompt"),
        (pool + 1, {}, "prompt"),
        (pool, {"max_tokens": 2}, "prompt"),
        (pool - 1, {"max_tokens": 2}, "max_tokens"),
        (10, {"max_tokens": pool - 9}, "max_tokens"),
        *([(pool, {"max_tokens": 1}, "prompt")] if aggregated else []),
    ]


@pytest.mark.parametrize("aggregated", [False, True])
async def test_what_no_pool_can_hold(aggregated: bool, model: Path) -> None:
    pool = BLOCKS * BLOCK
    async with served_cluster(model_config(model, blocks=BLOCKS, aggregated=aggregated)) as served:
        for length, fields, param in too_large(aggregated):
            small = [asyncio.create_task(ask(served, way, [START], max_tokens=20)) for way in WAYS]
            await assert_refused(served, [9] * length, code="kv_capacity_exceeded", param=param, **fields)
            for answer in await asyncio.gather(*small):
                assert (answer.completion_tokens, answer.finish) == (20, "length")
        if not aggregated:  # prefill alone holds it
            assert (await ask(served, "whole", [9] * pool, max_tokens=1)).completion_tokens == 1
        for way in WAYS:
            assert (await ask(served, way, [9] * (pool - 2), max_tokens=2)).completion_tokens == 2
            assert (await ask(served, way, [9] * 10, max_tokens=pool - 10)).completion_tokens == pool - 10
        await settled(served)


async def test_a_default_limit_never_asks_for_more_than_the_pool(model: Path) -> None:
    async with served_cluster(model_config(model, blocks=BLOCKS)) as served:
        assert (await ask(served, "whole", [9] * (BLOCKS * BLOCK - 3))).completion_tokens == 3
        await settled(served)


def with_bos(config: Config) -> Config:
    """The same model, whose tokenizer puts BOS in front."""
    path = Path(config.model.name) / "tokenizer_config.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"add_bos_token": True}))
    return config


@pytest.mark.parametrize("bos", [False, True])
async def test_prompts_without_tokens(bos: bool, model: Path) -> None:
    config = model_config(model)
    async with served_cluster(with_bos(config) if bos else config) as served:
        for prompt in ("", [""]):
            for stream in (False, True):
                response = await post(served, prompt, stream=stream, max_tokens=1)
                if bos:
                    assert response.status_code == 200
                else:
                    assert_error(response, code="invalid_request", param="prompt")
        if bos:
            assert (await ask(served, "grpc", "", max_tokens=1)).prompt_tokens == 1
        else:
            await assert_refused_over_grpc(served, "", code="invalid_request")
        await assert_refused_over_grpc(served, [], code="invalid_request")
        wrong: Any
        for wrong in ([], [[]], ["a", ""], [[9], []], ["a", [9]], None, 5, {}, [True], [1.5], [[[9]]]):
            for stream in (False, True):
                assert_error(await post(served, wrong, stream=stream), code="invalid_request", param="prompt")
        for wrong in ([], None, "hi", [None], [{}], [{"role": "user", "content": None}], [{"role": "user"}]):
            for stream in (False, True):
                body = {"model": "m", "messages": wrong, "stream": stream}
                response = await served.client.post("/v1/chat/completions", content=orjson.dumps(body))
                assert_error(response, code="invalid_request", param="messages")
        for way in CHAT_WAYS:
            assert (await ask(served, way, "", max_tokens=1)).completion_tokens == 1
        assert (await ask(served, "whole", [START], max_tokens=1)).text == "ok"
        await settled(served)

"""Limits and sampling fields: what is absent, at a bound or beyond it, and what must never reach prefill."""

import json
from pathlib import Path
from typing import Any

from tests.helpers.answers import (
    WAYS,
    ask,
    assert_refused,
    assert_refused_over_grpc,
    post,
    settled,
)
from tests.helpers.checkpoints import START, greedy_prompts, make_script_llama
from tests.helpers.model_cluster import model_config, served_cluster

BLOCKS, BLOCK = 10, 16


async def test_which_limit_counts(tmp_path: Path) -> None:
    make_script_llama(tmp_path, [b"a", b"b"], "filler")
    async with served_cluster(model_config(tmp_path, blocks=BLOCKS)) as served:
        fields: dict[str, Any]
        for fields, tokens in (
            ({}, 16),
            ({"max_tokens": None}, 16),
            ({"max_tokens": None, "max_completion_tokens": None}, 16),
            ({"max_completion_tokens": 4, "max_tokens": 9}, 4),
            ({"max_completion_tokens": 9, "max_tokens": 4}, 9),
            ({"max_completion_tokens": 7}, 7),
            ({"max_tokens": 3}, 3),
        ):
            for way in ("whole", "stream"):
                answer = await ask(served, way, [START], temperature=0, **fields)
                assert (answer.completion_tokens, answer.finish) == (tokens, "length")
            for way in ("chat", "chat stream"):
                answer = await ask(served, way, "hi", temperature=0, **fields)
                left = BLOCKS * BLOCK - answer.prompt_tokens
                assert answer.completion_tokens == (tokens if any(fields.values()) else left)
        over_grpc = [await ask(served, "grpc", [START], temperature=0), await ask(served, "grpc chat", "hi")]
        assert [answer.completion_tokens for answer in over_grpc] == [16, left]
        for wrong in (0, -1, 1.5, "8", True, [4]):
            for name in ("max_tokens", "max_completion_tokens"):
                for chat in (False, True):
                    response = await post(served, "hi" if chat else [START], chat=chat, **{name: wrong})
                    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        for wrong in (0, -1):
            await assert_refused(served, [START], code="invalid_request", param="max_tokens", max_tokens=wrong)
        await settled(served)


GOOD = {
    "temperature": (0, 1e-6, 2),
    "top_p": (0, 1e-9, 1),
    "top_k": (-1, 0, 1, 10**9),
    "seed": (0, 2**63 - 1),
    "min_tokens": (0, 4),
    "min_p": (0,),
    "n": (1,),
    "presence_penalty": (0,),
}
BAD = {
    "temperature": (-0.1, 2.1),
    "top_p": (-1e-9, 1.01),
    "top_k": (-2,),
    "seed": (-1,),
    "min_tokens": (-1, 5),
    "logprobs": (-1, 21),
}
BAD_HTTP = {
    "seed": (2**63, 2**64, 1.5),
    "top_k": (2**64, 1.5),
    "min_p": (2,),
    "presence_penalty": (2.01, -2.01),
    "frequency_penalty": (2.01, -2.01),
    "n": (0, 2),
    "temperature": ("1", [1]),
    "logit_bias": ({"5": 100},),
    "stop_token_ids": ([264 + 4 + 2], [-1], ["a"], 5),
}


async def test_bounds_of_sampling_fields(tmp_path: Path) -> None:
    make_script_llama(tmp_path, [b"aa", b"bb"], "filler")
    fields: dict[str, Any]
    async with served_cluster(model_config(tmp_path)) as served:
        for name, good in GOOD.items():
            for value in good:
                fields = {"max_tokens": 4, name: value}
                ways = WAYS if name not in ("min_p", "n", "presence_penalty") else ("whole", "stream")
                for way in ways:
                    assert (await ask(served, way, [START], **fields)).completion_tokens == 4
        bad: Any
        for name, bad in BAD.items():
            for value in bad:
                await assert_refused(
                    served, [START], code="invalid_request", param=name, **{"max_tokens": 4, name: value}
                )
        for name, bad in BAD_HTTP.items():
            for value in bad:
                for stream in (False, True):
                    body = {"model": "m", "prompt": [START], "max_tokens": 4, "stream": stream, name: value}
                    response = await served.client.post("/v1/completions", content=json.dumps(body))
                    assert response.status_code == 400, (name, value)
        for name in ("temperature", "top_p"):
            for literal in ("NaN", "Infinity", "-Infinity", "1e400"):
                raw = f'{{"model": "m", "prompt": [{START}], "{name}": {literal}}}'
                assert (await served.client.post("/v1/completions", content=raw)).status_code == 400
            for value in (float("nan"), float("inf")):
                fields = {name: value}
                await assert_refused_over_grpc(served, [START], code="invalid_request", **fields)
        await settled(served)


async def test_what_is_greedy(noise_llama: Path) -> None:
    """temperature 0 and 1e-6, top_k 1, and a top_p that only the best token passes, give the same tokens."""
    prompt = greedy_prompts()[7]
    async with served_cluster(model_config(noise_llama)) as served:
        for way in WAYS:
            expected = await ask(served, way, prompt, temperature=0, max_tokens=12)
            for fields in (
                {"temperature": 1e-6},
                {"temperature": 1e-300},
                {"temperature": 1, "top_k": 1},
                {"temperature": 2, "top_p": 1e-9},
                {"temperature": 1, "top_p": 0},
            ):
                assert (await ask(served, way, prompt, max_tokens=12, **fields)).pieces == expected.pieces
        tokens = (await ask(served, "grpc", prompt, temperature=0, max_tokens=12, logprobs=1)).raw
        assert all(t.id == t.top[0].token_id for response in tokens for t in response.tokens)
        await settled(served)

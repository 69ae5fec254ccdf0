"""Requests that their first token ends: one token exactly, and decode does nothing; and what prefill is asked for."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.answers import CHAT_WAYS, WAYS, Metrics, ask, assert_error, post, settled
from tests.helpers.checkpoints import EOS, START, greedy_prompts, make_script_llama
from tests.helpers.model_cluster import model_config, served_cluster

LONG = [9] * 70
"""Several blocks."""


def assert_decode_did_nothing(metrics: Metrics) -> None:
    assert metrics("pdserve_kv_transfer_bytes_total") == 0
    assert metrics("pdserve_generated_tokens_total", role="decode") == 0
    assert metrics("pdserve_step_seconds_count", role="decode") == 0


@pytest.mark.parametrize("transport", ["memory", "grpc"])
async def test_one_token_needs_no_decode_worker(transport: str, noise_llama: Path) -> None:
    async with served_cluster(model_config(noise_llama, aggregated=True)) as served:
        expected = [await ask(served, "grpc", p, max_tokens=2, temperature=0) for p in greedy_prompts()[-3:]]
    async with served_cluster(model_config(noise_llama, transport=transport, step_tokens=32)) as served:
        for prompt, whole in zip(greedy_prompts()[-3:], expected, strict=True):
            for way in WAYS:
                one = await ask(served, way, prompt, max_tokens=1, temperature=0)
                assert (one.completion_tokens, one.finish) == (1, "length")
                if way == "grpc":
                    assert one.token_ids == whole.token_ids[:1]
        metrics = await settled(served)
        assert_decode_did_nothing(metrics)
        assert metrics("pdserve_kv_transfer_seconds_count") == 0  # no hand-over was even begun
        assert metrics("pdserve_requests_finished_total", role="decode") == 0
        for prompt, whole in zip(greedy_prompts()[-3:], expected, strict=True):
            for way in WAYS:
                two = await ask(served, way, prompt, max_tokens=2, temperature=0)
                assert (two.completion_tokens, two.finish) == (2, "length")
                if way == "grpc":
                    assert two.token_ids == whole.token_ids
        await settled(served)


@pytest.mark.parametrize("prompt", [[START], [*LONG, START]], ids=["short", "long"])
@pytest.mark.parametrize(
    ("script", "fields", "text"),
    [
        (["<|eos|>", b"more"], {}, ""),
        (["<|im_end|>", b"more"], {}, ""),
        ([b"stop", b"more"], {"stop": ["stop"]}, ""),
        ([b"a stop.", b"more"], {"stop": ["stop"]}, "a "),
        ([b"a stop.", b"more"], {"stop": ["stop"], "include_stop_str_in_output": True}, "a stop"),
        ([b"x", b"more"], {"stop_token_ids": [8 + ord("x")]}, ""),
    ],
)
async def test_the_first_token_ends_it(
    script: list[bytes | str], fields: dict[str, Any], text: str, prompt: list[int], tmp_path: Path
) -> None:
    make_script_llama(tmp_path, script, "filler")
    async with served_cluster(model_config(tmp_path)) as served:
        for way in WAYS:
            answer = await ask(served, way, prompt, max_tokens=9, temperature=0, **fields)
            assert (answer.text, answer.finish, answer.completion_tokens) == (text, "stop", 1)
        metrics = await settled(served)
        assert_decode_did_nothing(metrics)
        assert metrics("pdserve_first_tokens_total", role="prefill") == len(WAYS)
        probe = await ask(served, "grpc", [START], max_tokens=4, temperature=0, ignore_eos=True)
        assert probe.completion_tokens == 4
        await settled(served)


REQUESTS: list[dict[str, Any]] = [
    {},
    {"min_tokens": 5, "max_tokens": 9},
    {"min_tokens": 9, "max_tokens": 9},
    {"max_completion_tokens": 7},
    {"max_tokens": 6, "logprobs": 2},
    {"max_tokens": 6, "stop_token_ids": [EOS], "min_tokens": 6},
]


async def test_prefill_draws_one_token_whatever_the_limits(noise_llama: Path) -> None:
    """The same answers as an aggregated worker, and exactly one token a request from prefill."""
    answers: dict[bool, list[Any]] = {}
    for aggregated in (True, False):
        async with served_cluster(model_config(noise_llama, aggregated=aggregated, blocks=12)) as served:
            found = answers[aggregated] = []
            for fields in REQUESTS:
                for way in ("whole", "stream", "chat", "chat stream"):
                    changed = fields | ({"logprobs": True} if "logprobs" in fields and way in CHAT_WAYS else {})
                    prompt: Any = "hello" if way in CHAT_WAYS else greedy_prompts()[8]
                    answer = await ask(served, way, prompt, temperature=0, **changed)
                    limits = [fields.get("max_tokens"), fields.get("max_completion_tokens"), 16]
                    if way not in CHAT_WAYS or fields:
                        assert answer.completion_tokens == next(limit for limit in limits if limit)
                    found.append((answer.text, answer.completion_tokens, answer.finish))
                for stream in (False, True):
                    response = await post(served, [START], n=2, stream=stream, **fields)
                    assert_error(response, code="invalid_request", param="n")
            metrics = await settled(served)
            if not aggregated:
                asked = len(found)
                assert metrics("pdserve_generated_tokens_total", role="prefill") == asked
                assert metrics("pdserve_first_tokens_total") == asked
                tokens = sum(count for _, count, _ in found)
                assert metrics("pdserve_generated_tokens_total", role="decode") == tokens - asked
    assert answers[True] == answers[False]

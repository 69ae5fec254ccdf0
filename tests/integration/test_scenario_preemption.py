"""Sequences that lose their blocks and come back: the same text once, the same stops, a finite number of times."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from telemetry.tracing import NO_SPAN, Attribute, Span
from tests.helpers.answers import WAYS, Answer, ask, settled
from tests.helpers.checkpoints import greedy_prompts
from tests.helpers.model_cluster import Served, model_config, served_cluster

PROMPTS = [prompt[:20] for prompt in greedy_prompts()[5:9]]
TOKENS = 100


class Resumes:
    """Tracing that only notes how often a sequence had been preempted whenever one came back."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    @property
    def traceparent(self) -> str:
        return ""

    def start(self, name: str, parent: str = "", **attributes: Attribute) -> Span:
        return self if name == "pdserve.decode" else NO_SPAN

    async def close(self) -> None:
        """Nothing to hand over."""

    def event(self, name: str, **attributes: Attribute) -> None:
        if name == "resumed":
            self.counts.append(int(attributes["preemptions"]))

    def set(self, **attributes: Attribute) -> None:
        """Nothing is recorded."""

    def end(self, error: str = "") -> None:
        """Nothing is recorded."""


async def ask_all(served: Served, way: str, stops: list[list[str]]) -> list[Answer]:
    """All prompts at once, each with its stop strings."""
    fields: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    if way == "grpc":
        fields["logprobs"] = 0
    work = (ask(served, way, p, stop=stop, **fields) for p, stop in zip(PROMPTS, stops, strict=True))
    return await asyncio.gather(*work)


@pytest.mark.parametrize("topology", [{}, {"transport": "grpc"}, {"aggregated": True}])
async def test_preempted_sequences_say_the_same(topology: dict[str, Any], noise_llama: Path) -> None:
    """Four sequences of up to eight blocks in a pool of twelve, without stop strings and with such as end in
    the middle of their answers."""
    without: list[list[str]] = [[]] * 4
    async with served_cluster(model_config(noise_llama, aggregated=True)) as served:
        alone = {way: await ask_all(served, way, without) for way in WAYS}
        texts = [answer.text for answer in alone["whole"]]
        stops = [[text[len(text) * 4 // 5 :][:4], "not there"] for text in texts]
        stopped = {way: await ask_all(served, way, stops) for way in WAYS}
    assert all(answer.completion_tokens == TOKENS for answer in alone["whole"])
    assert all(answer.finish == "stop" for answer in stopped["whole"])
    for way in WAYS:
        resumes = Resumes()
        async with served_cluster(model_config(noise_llama, blocks=12, **topology), resumes) as served:
            for expected, found in (
                (alone[way], await ask_all(served, way, without)),
                (stopped[way], await ask_all(served, way, stops)),
            ):
                for one, other in zip(expected, found, strict=True):
                    assert (other.text, other.finish) == (one.text, one.finish)
                    assert other.completion_tokens == one.completion_tokens
                    if way == "grpc":
                        assert other.token_ids == one.token_ids
                        assert [t.logprob for r in other.raw for t in r.tokens] == pytest.approx(
                            [t.logprob for r in one.raw for t in r.tokens], abs=1e-5
                        )
            metrics = await settled(served)
        preemptions = metrics("pdserve_preemptions_total", role="decode")
        assert 2 <= preemptions <= 8 * TOKENS
        assert max(resumes.counts) >= 2  # one of them more than once
        if not topology.get("aggregated"):
            assert metrics("pdserve_prompt_tokens_recomputed_total", role="decode") > 0

"""SmolLM2 through router, prefill, hand-over over gRPC and decode: 32 streams at once say what each says alone.

float32 cannot promise more than this: a row of a matrix product depends on how many rows are computed with it,
so two streams may part where the two best tokens are closer than 1e-3. From there they are not compared.
"""

import asyncio

import pytest

from contracts.config import Config
from contracts.requests import Token
from tests.helpers.model_cluster import greedy, model_cluster, model_config
from tests.helpers.simulated_cluster import collect
from text.model_resolver import resolve_model
from text.text_processor import TextProcessor

QUESTIONS = [
    "Name three colours.",
    "What is the capital of France?",
    "Write a haiku about rain.",
    "def fibonacci(n):",
    "Explain why the sky is blue, in two sentences, to a child who likes animals. " * 8,
    "1, 2, 3, 4,",
    "Translate to German: good morning.",
    "Once upon a time",
]
NEW_TOKENS = 16
NEAR_TIE = 1e-3


def gap(token: Token) -> float:
    """How far the best token's logprob is from the second best's."""
    assert token.logprobs is not None
    (_, best), (_, second) = token.logprobs.top
    return best - second


def assert_same_until_a_near_tie(found: list[Token], expected: list[Token]) -> int:
    """How many tokens were compared."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.token_id != other.token_id:
            assert min(gap(one), gap(other)) < NEAR_TIE, f"position {one.position} differs without a near tie"
            return index
        assert one.text == other.text
    return len(found)


@pytest.mark.model
async def test_32_streams_at_once_say_what_each_says_alone() -> None:
    text = TextProcessor(resolve_model(Config().model, lambda line: None))
    prompts = [text.template.prompt_ids([{"role": "user", "content": question}]) for question in QUESTIONS]
    wanted = [greedy(prompt, NEW_TOKENS, logprobs=2) for prompt in prompts]
    config = model_config("smollm2-135m", transport="grpc", blocks=600)
    async with model_cluster(config) as cluster:
        alone = [await collect(cluster, one) for one in wanted]
        together = await asyncio.gather(*(collect(cluster, wanted[index % len(wanted)]) for index in range(32)))
    compared = sum(
        assert_same_until_a_near_tie(found, alone[index % len(wanted)]) for index, found in enumerate(together)
    )
    assert compared > 24 * NEW_TOKENS

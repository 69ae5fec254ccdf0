"""noise-llama through the torch runner against transformers: any lost or shifted KV would move its logprobs."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.runners.base import Draw, Drawn
from engine.runners.torch_runner import TorchRunner
from tests.helpers.checkpoints import (
    NOISE_NEW_TOKENS,
    greedy_prompts,
    make_noise_llama,
    noise_tensors,
    write_noise_variant,
)
from tests.helpers.gguf_files import write_noise_gguf
from tests.helpers.oracle import Oracle, OracleRun
from tests.helpers.torch_engine import GREEDY, generate, load_runner, token_ids

SAMPLE = Draw(seed=99, position=1, temperature=1.0, top_p=0.95, top_k=0, logprobs=0)


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint."""
    directory = tmp_path_factory.mktemp("noise-llama")
    make_noise_llama(directory)
    return directory


@pytest.fixture(scope="module")
def expected(noise: Path) -> list[OracleRun]:
    """What transformers makes of the prompts."""
    oracle = Oracle(noise)
    return [oracle.greedy(prompt, NOISE_NEW_TOKENS) for prompt in greedy_prompts()]


@pytest.fixture
async def runner(noise: Path) -> AsyncIterator[TorchRunner]:
    """A runner, closed at the end."""
    runner = load_runner(noise)
    yield runner
    await runner.close()


def assert_equal(drawn: list[Drawn], run: OracleRun, tolerance: float = 1e-5) -> None:
    """The same tokens, with logprobs within the tolerance."""
    assert token_ids(drawn) == run.tokens
    logprobs = torch.log_softmax(run.logits.double(), dim=-1)
    for token, row in zip(drawn, logprobs, strict=True):
        assert token.logprobs is not None
        assert abs(token.logprobs.logprob - float(row[token.token_id])) < tolerance


def test_no_prompt_comes_near_a_tie(expected: list[OracleRun]) -> None:
    assert min(float(run.gaps.min()) for run in expected) > 1e-3


@pytest.mark.parametrize("chunk", [7, 16, 64, 512])
async def test_tokens_and_logprobs_for_any_chunk(runner: TorchRunner, expected: list[OracleRun], chunk: int) -> None:
    for drawn, run in zip(
        await generate(runner, greedy_prompts(), NOISE_NEW_TOKENS, chunk=chunk), expected, strict=True
    ):
        assert_equal(drawn, run)


async def test_two_threads_give_the_same_tokens(noise: Path, expected: list[OracleRun]) -> None:
    runner = load_runner(noise, threads=2)
    for drawn, run in zip(await generate(runner, greedy_prompts(), NOISE_NEW_TOKENS), expected, strict=True):
        assert_equal(drawn, run)
    await runner.close()


async def test_a_sequence_alone_is_what_it_is_in_a_batch(runner: TorchRunner) -> None:
    prompts = greedy_prompts()[:6]
    together = await generate(runner, prompts, 24, draw=SAMPLE)
    assert len({tuple(token_ids(drawn)) for drawn in together}) == len(prompts)
    for prompt, drawn in zip(prompts, together, strict=True):
        (alone,) = await generate(runner, [prompt], 24, draw=SAMPLE)
        assert token_ids(alone) == token_ids(drawn)


async def test_sharded_weights_are_the_same_model(tmp_path: Path, noise: Path, runner: TorchRunner) -> None:
    write_noise_variant(tmp_path, noise_tensors(), shards=3)
    sharded = load_runner(tmp_path)
    prompts = greedy_prompts()[:4]
    assert await generate(sharded, prompts, 8) == await generate(runner, prompts, 8)
    await sharded.close()


async def test_a_gguf_file_in_float32_is_the_same_model(tmp_path: Path, runner: TorchRunner) -> None:
    write_noise_gguf(tmp_path / "noise.gguf", noise_tensors(), "F32")
    loaded = load_runner(tmp_path / "noise.gguf")
    prompts = greedy_prompts()[:4]
    assert await generate(loaded, prompts, 8) == await generate(runner, prompts, 8)
    await loaded.close()


async def test_a_quantised_gguf_file_is_what_transformers_reads(tmp_path: Path) -> None:
    write_noise_gguf(tmp_path / "noise.gguf", noise_tensors(), "Q4_1")
    oracle, runner = Oracle(tmp_path / "noise.gguf"), load_runner(tmp_path / "noise.gguf")
    for prompt in greedy_prompts()[3:6]:
        (drawn,) = await generate(runner, [prompt], 12)
        assert_equal(drawn, oracle.greedy(prompt, 12))
    await runner.close()


async def test_bfloat16_is_near(noise: Path, expected: list[OracleRun]) -> None:
    runner = load_runner(noise, dtype="bfloat16")
    assert runner.store.layout.block_bytes * 2 == 2 * 2 * 2 * 16 * 16 * 4
    forced = [run.tokens for run in expected]
    drawn = await generate(runner, greedy_prompts(), 16, draw=replace(GREEDY, logprobs=1), forced=forced)
    logprobs = [torch.log_softmax(run.logits, dim=-1) for run in expected]
    errors = [
        abs(token.logprobs.logprob - float(logprobs[row][step, token.token_id]))
        for row, tokens in enumerate(drawn)
        for step, token in enumerate(tokens)
        if token.logprobs
    ]
    assert len(errors) == 16 * len(forced)
    assert 1e-4 < max(errors) < 0.3  # rounded somewhere, and not wrong
    await runner.close()

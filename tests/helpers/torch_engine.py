"""Drives a TorchRunner without the engine's loop: chunked prefill, then batched decode."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from contracts.config import EngineConfig, KvConfig, ModelConfig
from contracts.kv import blocks_for
from engine.runners.base import Draw, Drawn, Row, StepPlan
from engine.runners.torch_runner import TorchRunner, create
from text.model_resolver import resolve_model

BLOCK_SIZE = 16
GREEDY = Draw(seed=0, position=1, temperature=0.0, top_p=1.0, top_k=0, logprobs=0)


def load_runner(model: str | Path, blocks: int = 300, dtype: str = "float32", threads: int = 1) -> TorchRunner:
    """The runner of a model by name or path."""
    config = ModelConfig(name=str(model), dtype=dtype)
    files = resolve_model(config, progress=lambda line: None)
    kv = KvConfig(block_size=BLOCK_SIZE, blocks=blocks)
    return create(files, EngineConfig(threads=threads), config, kv, tokenizer_fingerprint="tokenizer")


async def generate(
    runner: TorchRunner,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    chunk: int = 512,
    draw: Draw = GREEDY,
    forced: Sequence[Sequence[int]] | None = None,
) -> list[list[Drawn]]:
    """`new_tokens` draws of each prompt, all prompts decoded in one batch; `draw` gets the right positions.

    `forced`: the sequences continue with these tokens, whatever was drawn. Blocks are dealt out in a random
    order, so that a block table that is not followed shows.
    """
    deck = np.random.default_rng(3).permutation(runner.store.blocks)
    tables = []
    for prompt in prompts:
        count = blocks_for(len(prompt) + new_tokens, BLOCK_SIZE)
        tables.append(deck[:count])
        deck = deck[count:]
    contexts = [list(prompt) for prompt in prompts]
    drawn: list[list[Drawn]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        for start in range(0, len(prompt), chunk):
            piece = prompt[start : start + chunk]
            last = start + len(piece) == len(prompt)
            row = Row(piece, start, tables[index], _at(draw, 1) if last else None)
            (result,) = (await runner.run(StepPlan((row,)))).drawn
            assert (result is not None) == last
            drawn[index] += [result] if result else []
    for step in range(1, new_tokens):
        for index, context in enumerate(contexts):
            context.append(forced[index][step - 1] if forced else drawn[index][-1].token_id)
        rows = tuple(
            Row(context[-1:], len(context) - 1, table, _at(draw, step + 1))
            for context, table in zip(contexts, tables, strict=True)
        )
        for index, result in enumerate((await runner.run(StepPlan(rows))).drawn):
            assert result is not None
            drawn[index].append(result)
    return drawn


def token_ids(drawn: Sequence[Drawn]) -> list[int]:
    """The tokens of one sequence."""
    return [token.token_id for token in drawn]


def _at(draw: Draw, position: int) -> Draw:
    return Draw(draw.seed, position, draw.temperature, draw.top_p, draw.top_k, draw.logprobs, draw.banned)

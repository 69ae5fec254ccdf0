"""The torch runner around the model: sizes, identity, isolation of rows, cancelling and closing."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.config import EngineConfig, KvConfig, ModelConfig
from contracts.errors import StartupError
from contracts.kv import KvLayout
from engine.attention.base import Attention
from engine.attention.reference import create as create_attention
from engine.kv_pool import KvPool
from engine.runners.base import Draw, Row, StepPlan
from engine.runners.torch_runner import TorchRunner, create
from engine.step_tensors import StepTensors
from tests.helpers.checkpoints import make_noise_llama
from text.model_resolver import ModelFiles, resolve_model

LAYOUT = KvLayout("m", "t", "n", "float32", layers=1, kv_heads=1, head_dim=4, block_size=16, rope="r")
DRAW = Draw(seed=0, position=1, temperature=0.0, top_p=1.0, top_k=0, logprobs=None)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    make_noise_llama(tmp_path)
    return resolve_model(ModelConfig(name=str(tmp_path)), lambda line: None)


class FixedModel:
    """Gives out the same logits; its forward waits for `go`."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.entered = threading.Event()
        self.go = threading.Event()
        self.steps_ended = 0
        self.threads: set[tuple[str, int]] = set()

    def forward(self, step: StepTensors, pool: KvPool, attention: Attention) -> torch.Tensor:
        """The logits of as many rows as draw."""
        self.threads.add((threading.current_thread().name, torch.get_num_threads()))
        self.entered.set()
        assert self.go.wait(10)
        self.steps_ended += 1
        return self.logits[: len(step.drawing)]


def fixed_runner(logits: torch.Tensor, waiting: bool = False, threads: int = 1) -> tuple[TorchRunner, FixedModel]:
    """A runner over a FixedModel."""
    model = FixedModel(logits)
    if not waiting:
        model.go.set()
    return TorchRunner(model, create_attention(), KvPool(LAYOUT, 4), logits.shape[1], threads), model


def plan(*draws: Draw | None) -> StepPlan:
    """A row of one token for each draw."""
    return StepPlan(tuple(Row([1], 0, np.array([index]), draw) for index, draw in enumerate(draws)))


async def test_draws_belong_to_their_rows_and_a_bad_row_harms_no_other() -> None:
    logits = torch.zeros(3, 10)
    logits[0, 4], logits[1, 2], logits[2, 7] = 1.0, torch.nan, 1.0
    runner, _ = fixed_runner(logits)
    drawn = (await runner.run(plan(DRAW, None, DRAW, DRAW))).drawn
    assert [d and (d.token_id, d.finite) for d in drawn] == [(4, True), None, (0, False), (7, True)]
    await runner.close()


async def test_steps_run_on_one_thread_with_its_number_of_threads() -> None:
    torch.set_num_threads(1)
    runner, model = fixed_runner(torch.zeros(1, 10), threads=2)
    for _ in range(3):
        result = await runner.run(plan(DRAW))
    assert [count for _, count in model.threads] == [2]
    assert threading.current_thread().name not in dict(model.threads)
    assert min(result.times.tensors, result.times.forward, result.times.sampling) > 0
    await runner.close()
    assert not any(thread.name in dict(model.threads) for thread in threading.enumerate())


async def test_a_cancelled_run_ends_only_after_its_step() -> None:
    runner, model = fixed_runner(torch.zeros(1, 10), waiting=True)
    running = asyncio.create_task(runner.run(plan(DRAW)))
    await asyncio.to_thread(model.entered.wait, 10)
    running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    model.go.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert model.steps_ended == 1
    await runner.close()


async def test_close_waits_for_the_running_step_and_can_be_repeated() -> None:
    runner, model = fixed_runner(torch.zeros(1, 10), waiting=True)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run(plan(DRAW)))
        await asyncio.to_thread(model.entered.wait, 10)
        closing = group.create_task(runner.close())
        await asyncio.sleep(0)
        assert not closing.done()
        model.go.set()
    assert running.result().drawn[0] is not None
    await runner.close()


@pytest.mark.parametrize(("tokens", "start", "block"), [([1], 0, -1), ([1], 16, 1), ([], 0, 1)])
async def test_a_plan_that_cannot_be_raises_and_the_next_step_works(tokens: list[int], start: int, block: int) -> None:
    runner, _ = fixed_runner(torch.zeros(1, 10))
    with pytest.raises(AssertionError):
        await runner.run(StepPlan((*plan(DRAW).rows, Row(tokens, start, np.array([block]), None))))
    assert (await runner.run(plan(DRAW))).drawn[0] is not None
    await runner.close()


@pytest.mark.parametrize(
    ("kv", "blocks"),
    [
        (KvConfig(blocks=7, memory="1GiB"), 7),
        (KvConfig(memory=str(5 * BLOCK_BYTES + 1)), 5),
        (KvConfig(memory=str(5 * BLOCK_BYTES), block_size=8), 10),
    ],
)
async def test_pool_size(files: ModelFiles, kv: KvConfig, blocks: int) -> None:
    runner = create(files, EngineConfig(threads=1), ModelConfig(), kv, "tokenizer")
    assert runner.store.blocks == blocks
    assert runner.vocab_size == 512
    await runner.close()


def test_memory_for_no_block_is_refused(files: ModelFiles) -> None:
    with pytest.raises(StartupError, match=f"holds no KV block of {BLOCK_BYTES} bytes"):
        create(files, EngineConfig(threads=1), ModelConfig(), KvConfig(memory="1KiB"), "tokenizer")


async def test_layouts_of_other_models_or_numerics_differ(files: ModelFiles) -> None:
    def layout(files: ModelFiles, dtype: str = "float32", tokenizer: str = "tokenizer") -> KvLayout:
        return create(
            files, EngineConfig(threads=1), ModelConfig(dtype=dtype), KvConfig(blocks=1), tokenizer
        ).store.layout

    mine = layout(files)
    assert mine.block_bytes == BLOCK_BYTES
    assert mine.difference(layout(files)) is None
    other = replace(files, metadata=replace(files.metadata, rope_theta=5.0))
    assert [str(mine.difference(theirs)).split(":")[0] for theirs in (layout(other), layout(files, tokenizer="x"))] == [
        "rope",
        "tokenizer",
    ]
    assert str(mine.difference(layout(files, "bfloat16"))).startswith("numerics: 'torch-reference-float32-v1'")

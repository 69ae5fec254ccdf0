"""The runner that computes the model with torch, on one thread of its own.

The engine's loop awaits it once per step. Nothing but that thread touches the model, and it writes no
block that the plan does not name.
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import torch

from contracts.config import EngineConfig, KvConfig, ModelConfig, parse_bytes
from contracts.errors import StartupError
from contracts.kv import KvLayout
from contracts.seams import load_plug
from engine.attention.base import Attention
from engine.kv_pool import KvPool
from engine.models.base import Model
from engine.runners.base import StepPlan, StepResult, StepTimes
from engine.sampler import draw_token
from engine.step_tensors import build_step
from engine.weights.checkpoint import Checkpoint
from engine.weights.gguf import GgufSource
from engine.weights.safetensors import SafetensorsSource
from text.metadata import ModelMetadata
from text.model_resolver import ModelFiles

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchRunner:
    """See engine/runners/base.py for the contract."""

    def __init__(self, model: Model, attention: Attention, pool: KvPool, vocab_size: int, threads: int) -> None:
        """`threads`: how many cores torch may use in a step."""
        self._model = model
        self._attention = attention
        self._pool = pool
        self._vocab_size = vocab_size
        # OpenMP counts threads per calling thread, so the number is set on the thread that computes.
        self._executor = ThreadPoolExecutor(1, "torch-runner", initializer=torch.set_num_threads, initargs=(threads,))
        self._closed = False

    @property
    def store(self) -> KvPool:
        return self._pool

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    async def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. When cancelled it still waits for the thread, which no one can interrupt: after
        run() has ended, nobody writes the plan's blocks."""
        step = asyncio.get_running_loop().run_in_executor(self._executor, self._step, plan)
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait((step,))
            raise

    async def close(self) -> None:
        """Let the running step end, then free model and pool and stop the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._executor, self._release)
        self._executor.shutdown()

    def _release(self) -> None:
        del self._model
        self._pool.close()

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        started = perf_counter()
        step = build_step(plan, self._pool.layout.block_size)
        # A negative index would count from the end and overwrite a stranger's block.
        assert int(step.slots.min()) >= 0, "a block table names a negative block"
        built = perf_counter()
        logits = self._model.forward(step, self._pool, self._attention).numpy()
        computed = perf_counter()
        rows = iter(logits)
        drawn = tuple(None if row.draw is None else draw_token(next(rows), row.draw) for row in plan.rows)
        times = StepTimes(built - started, computed - built, perf_counter() - computed)
        return StepResult(drawn, times)


def create(
    files: ModelFiles, engine: EngineConfig, model: ModelConfig, kv: KvConfig, tokenizer_fingerprint: str
) -> TorchRunner:
    """Load the weights and allocate the pool. Raises ModelError for weights that do not fit the model, StartupError
    when the pool cannot be allocated. Takes seconds; call it off the event loop."""
    metadata = files.metadata
    layout = _layout(metadata, engine, model, kv, tokenizer_fingerprint)
    pool = KvPool(layout, _pool_blocks(layout, kv))
    checkpoint = _open_checkpoint(files, _DTYPES[model.dtype])
    family = load_plug("model", metadata.model_type)
    attention: Attention = load_plug("attention", engine.attention).create()
    loaded: Model = family.create(metadata, checkpoint, model.max_context or metadata.max_context)
    return TorchRunner(loaded, attention, pool, metadata.vocab_size, engine.threads or os.cpu_count() or 1)


def _layout(
    metadata: ModelMetadata, engine: EngineConfig, model: ModelConfig, kv: KvConfig, tokenizer_fingerprint: str
) -> KvLayout:
    return KvLayout(
        model=metadata.fingerprint,
        tokenizer=tokenizer_fingerprint,
        numerics=f"torch-{engine.attention}-{model.dtype}-v1",
        dtype=model.dtype,
        layers=metadata.layers,
        kv_heads=metadata.kv_heads,
        head_dim=metadata.head_dim,
        block_size=kv.block_size,
        rope=f"halves-theta{metadata.rope_theta:g}-dim{metadata.rope_dim}",
    )


def _pool_blocks(layout: KvLayout, kv: KvConfig) -> int:
    if kv.blocks:
        return kv.blocks
    blocks = parse_bytes("kv.memory", kv.memory) // layout.block_bytes
    if not blocks:
        raise StartupError(f"kv.memory {kv.memory} holds no KV block of {layout.block_bytes} bytes", param="kv.memory")
    return blocks


def _open_checkpoint(files: ModelFiles, dtype: torch.dtype) -> Checkpoint:
    if files.kind == "gguf":
        return Checkpoint(GgufSource(files.path, files.metadata.heads, files.metadata.kv_heads), dtype)
    return Checkpoint(SafetensorsSource(files.weight_files), dtype)

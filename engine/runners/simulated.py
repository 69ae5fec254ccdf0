"""A runner without a model that still depends on every byte of the KV: for tests and the simulator.

It writes a fingerprint of (token, position, parent fingerprint) into the K slot of each token in a real BlockStore, and
its complement into the V slot, and draws the next token from all that it reads back through the block table. A lost,
stale, shifted or foreign block changes the tokens. It waits `cost(plan)` seconds of the event loop's time.
"""

import asyncio
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from contracts.kv import KvLayout
from contracts.requests import TokenLogprobs
from engine.pool_memory import PoolMemory
from engine.runners.base import Draw, Drawn, Row, Runner, StepPlan, StepResult, StepTimes

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15  # odd; the golden ratio in 64 bits


class SimulatedRunner:
    """See the module. `vocab_size` ids are drawn evenly, except `banned` ones."""

    def __init__(self, layout: KvLayout, blocks: int, vocab_size: int, cost: Callable[[StepPlan], float]) -> None:
        """The layout has one layer and one head of one uint64. Raises StartupError."""
        self._store = PoolMemory(layout, blocks)
        self._slots = self._store.array[:blocks].view(np.uint64).reshape(blocks, 2, layout.block_size)
        self._vocab_size = vocab_size
        self._cost = cost

    @property
    def store(self) -> PoolMemory:
        return self._store

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    async def run(self, plan: StepPlan) -> StepResult:
        """Write at the end of the simulated time, as a device does."""
        seconds = self._cost(plan)
        await asyncio.sleep(seconds)
        drawn = tuple(self._compute(row) for row in plan.rows)
        return StepResult(drawn, StepTimes(0.0, seconds, 0.0))

    async def close(self) -> None:
        """Idempotent."""
        self._slots = np.empty((0, 2, self._store.layout.block_size), np.uint64)
        self._store.close()

    def _compute(self, row: Row) -> Drawn | None:
        size = self._store.layout.block_size
        table = np.asarray(row.block_table, dtype=np.int64)
        parent = self._fingerprint(table, row.start - 1) if row.start else 0
        for position, token in enumerate(row.tokens, start=row.start):
            parent = ((parent ^ (token + 1) * _MIX) * _MIX + position) & _MASK
            block, offset = int(table[position // size]), position % size
            self._slots[block, 0, offset] = parent
            self._slots[block, 1, offset] = parent ^ _MASK
        if row.draw is None:
            return None
        return self._draw(table, row.start + len(row.tokens), row.draw)

    def _fingerprint(self, table: npt.NDArray[np.int64], position: int) -> int:
        size = self._store.layout.block_size
        return int(self._slots[int(table[position // size]), 0, position % size])

    def _draw(self, table: npt.NDArray[np.int64], length: int, draw: Draw) -> Drawn:
        size = self._store.layout.block_size
        blocks = self._slots[table[: -(-length // size)]]
        keys = np.ascontiguousarray(blocks[:, 0].reshape(-1)[:length])
        values = np.ascontiguousarray(blocks[:, 1].reshape(-1)[:length])
        state = xxhash.xxh3_64_intdigest(keys.tobytes() + values.tobytes())
        if draw.temperature > 0:
            state = xxhash.xxh3_64_intdigest(f"{state} {draw.seed} {draw.position}".encode())
        assert len(set(draw.banned)) < self._vocab_size, "every token is banned"
        token = state % self._vocab_size
        while token in draw.banned:
            token = (token + 1) % self._vocab_size
        logprob = TokenLogprobs(-math.log(self._vocab_size)) if draw.logprobs is not None else None
        return Drawn(token, logprob)


def create(layout: KvLayout, blocks: int, vocab_size: int, cost: Callable[[StepPlan], float]) -> Runner:
    """The plug's factory."""
    return SimulatedRunner(layout, blocks, vocab_size, cost)

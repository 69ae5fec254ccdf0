"""The flat batch of a step: a StepPlan as tensors. The runner builds it, models and attention read it.

Its cost depends on the tokens of the step, never on how long the sequences are.
"""

from dataclasses import dataclass

import numpy as np
import torch

from contracts.kv import blocks_for
from engine.attention.base import AttentionRow
from engine.runners.base import StepPlan


@dataclass(frozen=True, slots=True)
class StepTensors:
    """All tokens of all rows, one row after the other. Tensors are int64.

    `slots` says where a token's KV is stored (block * block_size + offset); `drawing` are the flat
    indices of the last tokens of the rows that draw, in order of the rows.
    """

    tokens: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens], from 0 within each sequence
    slots: torch.Tensor  # [tokens]
    rows: list[AttentionRow]
    drawing: torch.Tensor  # [rows that draw]


def build_step(plan: StepPlan, block_size: int) -> StepTensors:
    """The tensors of a plan with at least one row; every row has at least one token.

    A block table that is a numpy array is used in place until the step ends; another sequence is copied.
    """
    assert plan.rows, "a step has at least one row"
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    rows: list[AttentionRow] = []
    drawing: list[int] = []
    first = 0
    for row in plan.rows:
        count = len(row.tokens)
        end = row.start + count
        table = np.asarray(row.block_table, np.int64)[: blocks_for(end, block_size)]
        assert count > 0, "a row computes at least one token"
        assert len(table) == blocks_for(end, block_size), f"{len(table)} blocks do not hold {end} tokens"
        places = np.arange(row.start, end)
        tokens.append(np.asarray(row.tokens, np.int64))
        positions.append(places)
        slots.append(table[places // block_size] * block_size + places % block_size)
        rows.append(AttentionRow(first, count, row.start, torch.from_numpy(table)))
        first += count
        if row.draw is not None:
            drawing.append(first - 1)
    return StepTensors(
        torch.from_numpy(np.concatenate(tokens)),
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(np.concatenate(slots)),
        rows,
        torch.tensor(drawing, dtype=torch.int64),
    )

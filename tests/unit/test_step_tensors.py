"""The flat batch: what lies where."""

import numpy as np
import pytest

from engine.runners.base import Draw, Row, StepPlan
from engine.step_tensors import build_step

DRAW = Draw(0, 1, 0.0, 1.0, 0, None)


def test_rows_lie_one_after_the_other() -> None:
    plan = StepPlan(
        (
            Row([5, 6, 7], 3, np.array([9, 2]), None),
            Row([8], 4, np.array([4, 1, 30]), DRAW),
            Row([1, 2], 0, np.array([3]), DRAW),
        )
    )
    step = build_step(plan, block_size=4)
    assert step.tokens.tolist() == [5, 6, 7, 8, 1, 2]
    assert step.positions.tolist() == [3, 4, 5, 4, 0, 1]
    assert step.slots.tolist() == [9 * 4 + 3, 2 * 4, 2 * 4 + 1, 1 * 4, 3 * 4, 3 * 4 + 1]
    assert step.drawing.tolist() == [3, 5]
    assert [(row.first, row.count, row.start) for row in step.rows] == [(0, 3, 3), (3, 1, 4), (4, 2, 0)]
    assert [row.blocks.tolist() for row in step.rows] == [[9, 2], [4, 1], [3]]  # not the blocks of later tokens


def test_a_long_block_table_is_not_copied() -> None:
    table = np.arange(100)
    step = build_step(StepPlan((Row([1], 30, table, None),)), block_size=16)
    assert step.rows[0].blocks.tolist() == [0, 1]
    assert step.rows[0].blocks.data_ptr() == table.__array_interface__["data"][0]


@pytest.mark.parametrize("row", [Row([], 0, np.array([1]), None), Row([1, 2], 15, np.array([1]), None)])
def test_a_plan_that_cannot_be_is_our_fault(row: Row) -> None:
    with pytest.raises(AssertionError):
        build_step(StepPlan((row,)), block_size=16)

"""Every attention plug against attention by its definition, in float64."""

from itertools import pairwise

import pytest
import torch

from contracts.seams import load_plug, plugs
from engine.attention.base import Attention, AttentionRow

HEADS, KV_HEADS, DIM, BLOCK_SIZE, BLOCKS = 6, 2, 8, 4, 40
SCALE = 0.3
CHUNKS = [(0, 1), (0, 9), (3, 1), (7, 1), (8, 1), (4, 4), (5, 11), (30, 2)]  # (start, count) of each row


@pytest.fixture(params=plugs("attention"))
def attention(request: pytest.FixtureRequest) -> Attention:
    plug: Attention = load_plug("attention", request.param).create()
    return plug


class Batch:
    """Rows with random queries, keys and values; all keys and values but a row's own lie in the pool already."""

    def __init__(self, attention: Attention) -> None:
        torch.manual_seed(5)
        whole_pool = torch.full((BLOCKS, 3, 2, KV_HEADS, BLOCK_SIZE, DIM), torch.nan)  # what is not written is poison
        self.pool = whole_pool[:, 1]
        self.attention = attention
        self.rows: list[AttentionRow] = []
        self.history: list[tuple[torch.Tensor, torch.Tensor]] = []
        deck = torch.randperm(BLOCKS)
        first = 0
        for start, count in CHUNKS:
            needed = -(-(start + count) // BLOCK_SIZE)
            blocks, deck = deck[:needed], deck[needed:]
            keys, values = torch.randn(2, start + count, KV_HEADS, DIM)
            positions = torch.arange(start + count)
            slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            attention.write(self.pool, keys[:start], values[:start], slots[:start])
            attention.write(self.pool, keys[start:], values[start:], slots[start:])
            self.rows.append(AttentionRow(first, count, start, blocks))
            self.history.append((keys, values))
            first += count
        self.queries = torch.randn(first, HEADS, DIM)

    def attend(self, rows: list[AttentionRow]) -> torch.Tensor:
        """Outputs of all tokens, computed for `rows`."""
        return self.attention.attend(self.pool, self.queries, rows, SCALE)

    def expected(self, index: int) -> torch.Tensor:
        """[count, heads, dim] of one row, query by query, head by head."""
        row, (keys, values) = self.rows[index], self.history[index]
        outputs = torch.empty(row.count, HEADS, DIM, dtype=torch.float64)
        for query in range(row.count):
            seen = row.start + query + 1
            for head in range(HEADS):
                shared = head // (HEADS // KV_HEADS)
                scores = keys[:seen, shared].double() @ self.queries[row.first + query, head].double() * SCALE
                outputs[query, head] = scores.softmax(0) @ values[:seen, shared].double()
        return outputs


def test_outputs_are_those_of_the_definition(attention: Attention) -> None:
    batch = Batch(attention)
    outputs = batch.attend(batch.rows)
    assert outputs.shape == batch.queries.shape
    for index, row in enumerate(batch.rows):
        found = outputs[row.first : row.first + row.count]
        torch.testing.assert_close(found.double(), batch.expected(index), atol=2e-6, rtol=0)


def test_a_row_does_not_depend_on_its_neighbours(attention: Attention) -> None:
    batch = Batch(attention)
    together = batch.attend(batch.rows)
    bounds = [row.first for row in batch.rows] + [len(batch.queries)]
    for row, (first, end) in zip(batch.rows, pairwise(bounds), strict=True):
        assert torch.equal(batch.attend([row])[first:end], together[first:end])


def test_write_touches_only_its_slots(attention: Attention) -> None:
    pool = torch.zeros(BLOCKS, 2, KV_HEADS, BLOCK_SIZE, DIM)
    attention.write(pool, torch.ones(2, KV_HEADS, DIM), torch.full((2, KV_HEADS, DIM), 2.0), torch.tensor([13, 6]))
    for block, offset in ((3, 1), (1, 2)):
        assert (pool[block, 0, :, offset] == 1).all()
        assert (pool[block, 1, :, offset] == 2).all()
        pool[block, :, :, offset] = 0
    assert not pool.any()

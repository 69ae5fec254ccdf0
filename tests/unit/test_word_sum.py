"""The checksum that a CPU and a GPU find alike."""

import random

import numpy as np
import pytest
import torch

from kv_transfer.channels.word_sum import WordSum


def by_definition(block: bytes) -> int:
    words = [int.from_bytes(block[at : at + 8], "little") for at in range(0, len(block), 8)]
    return sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**64


def on_tensor(block: bytes, device: str = "cpu") -> int:
    """As a GPU would: its int64 arithmetic wraps round."""
    padded = bytearray(block + bytes(-len(block) % 8))
    words = torch.frombuffer(padded, dtype=torch.int64).to(device)
    return int((words * torch.arange(1, 2 * len(words), 2, device=device)).sum()) % 2**64


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 63, 64, 4096, 46_080, 100_003])
@pytest.mark.parametrize("fill", ["random", "ones"])
def test_all_implementations_agree(size: int, fill: str) -> None:
    block = random.Random(size).randbytes(size) if fill == "random" else b"\xff" * size
    expected = by_definition(block)
    assert WordSum(size).of(memoryview(block)) == expected
    assert on_tensor(block) == expected


@pytest.mark.gpu
def test_a_gpu_agrees() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    block = random.Random(1).randbytes(737_280)
    assert on_tensor(block, "cuda") == WordSum(len(block)).of(memoryview(block))


def test_every_one_of_1000_flipped_bits_shows() -> None:
    rng = random.Random(2)
    block = bytearray(rng.randbytes(46_080))
    word_sum = WordSum(len(block))
    before = word_sum.of(memoryview(block))
    for _ in range(1000):
        at, bit = rng.randrange(len(block)), 1 << rng.randrange(8)
        block[at] ^= bit
        assert word_sum.of(memoryview(block)) != before
        block[at] ^= bit
    assert word_sum.of(memoryview(block)) == before


def test_every_one_of_1000_swaps_of_words_shows() -> None:
    rng = random.Random(3)
    block = bytearray(rng.randbytes(46_080))
    word_sum, words = WordSum(len(block)), np.frombuffer(block, np.uint64)
    before = word_sum.of(memoryview(block))
    for _ in range(1000):
        pair = rng.sample(range(len(words)), 2)
        words[pair] = words[pair[::-1]]
        assert word_sum.of(memoryview(block)) != before
        words[pair] = words[pair[::-1]]
    assert word_sum.of(memoryview(block)) == before

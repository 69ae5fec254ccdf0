"""Writes tests/golden/smollm2.npz: what Hugging Face transformers computes for SmolLM2 in float32.

Run from the repository's root: `python -m tests.golden.refresh_smollm2`. The file holds 20 prompts of 1 to
1,500 token ids, 64 greedy tokens of each, and the 16 best logits that each of these was chosen from.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np

from contracts.config import ModelConfig
from tests.helpers.oracle import Oracle
from text.model_resolver import resolve_model
from text.tokenizer import load_tokenizer

FILE = Path(__file__).with_name("smollm2.npz")
LENGTHS = (1, 2, 5, 15, 16, 17, 31, 33, 64, 100, 128, 200, 255, 300, 400, 512, 513, 700, 1000, 1500)
NEW_TOKENS, BEST = 64, 16
PROSE = """The lighthouse keeper wrote down the weather every evening, in a hand that grew smaller as the paper ran
out. In March there were 19 days of fog; in April, none. "If anybody asks," she told the boatman, "say that the lamp
was lit." He asked her what the numbers were for. Nobody had ever asked, so she showed him: wind, sea, the height of
the tide at noon, and one word for the mood of the gulls. Přístav byl prázdný, 港は静かだった, and the ferry 🚢 \
came late.
"""
CHAT = """<|im_start|>user
What is the capital of France, and how far is it from Lyon by train?<|im_end|>
<|im_start|>assistant
"""


def main() -> None:
    """Compute and write the file. Takes minutes."""
    files = resolve_model(ModelConfig(), progress)
    encode = load_tokenizer(files).encode
    prompts = [make_prompt(index, length, encode) for index, length in enumerate(LENGTHS)]
    oracle = Oracle(files.path)
    tokens, ids, logits = [], [], []
    for prompt in prompts:
        run = oracle.greedy(prompt, NEW_TOKENS)
        best = run.logits.topk(BEST, dim=-1)
        tokens.append(run.tokens)
        ids.append(best.indices.numpy())
        logits.append(best.values.numpy())
        progress(f"{len(prompt)} tokens: smallest gap {float(run.gaps.min()):.5f}")
    np.savez_compressed(
        FILE,
        lengths=np.array(LENGTHS, np.int32),
        prompts=np.concatenate([np.array(prompt, np.int32) for prompt in prompts]),
        tokens=np.array(tokens, np.int32),
        best_ids=np.array(ids, np.int32),
        best_logits=np.array(logits, np.float32),
    )


def progress(line: str) -> None:
    """A line for the one who waits."""
    sys.stderr.write(line + "\n")


def make_prompt(index: int, length: int, encode: Callable[[str, bool], list[int]]) -> list[int]:
    """`length` ids that end where the text ends: prose, a program, a conversation, or ids at random."""
    kind = index % 4
    if kind == 3:
        ids: list[int] = np.random.default_rng(index).integers(3, 49_152, length).tolist()
        return ids
    text = (PROSE * 20, inspect.getsource(textwrap), PROSE * 20 + CHAT)[kind]
    return encode(text, True)[-length:]


if __name__ == "__main__":
    main()

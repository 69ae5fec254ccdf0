"""Hugging Face transformers as the oracle of the torch engine. Only tests and golden files use it."""

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class OracleRun:
    """Greedy decoding of one prompt: the new tokens, and the logits [new, vocab] that each was chosen from."""

    tokens: list[int]
    logits: torch.Tensor

    @property
    def gaps(self) -> torch.Tensor:
        """[new] distance of the two best logits."""
        best = self.logits.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]


class Oracle:
    """A float32 causal language model in transformers, from a directory or a .gguf file."""

    def __init__(self, path: Path) -> None:
        self._model: Any = _load(path)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], new_tokens: int) -> OracleRun:
        """The prompt in one piece, then one token after another; end tokens do not end it."""
        tokens: list[int] = []
        logits: list[torch.Tensor] = []
        cache: Any = None
        step = torch.tensor([prompt])
        while len(tokens) < new_tokens:
            answer = self._model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = answer.past_key_values
            logits.append(answer.logits[0, -1].float())
            tokens.append(int(logits[-1].argmax()))
            step = torch.tensor([tokens[-1:]])
        return OracleRun(tokens, torch.stack(logits))


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        # transformers warns about its own and its dependencies' deprecations; the oracle's are not ours to fix
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 (it takes seconds and warns on import)

        logging.getLogger("transformers").setLevel(logging.ERROR)
        if path.is_dir():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()

"""Hugging Face transformers as the oracle of the torch engine. Only tests and golden files use it."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
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
        with _quiet():
            from transformers import DynamicCache  # noqa: PLC0415

            cache = DynamicCache()
            step = torch.tensor([prompt])
            while len(tokens) < new_tokens:
                answer = self._model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
                logits.append(answer.logits[0, -1].float())
                tokens.append(int(logits[-1].argmax()))
                step = torch.tensor([tokens[-1:]])
        return OracleRun(tokens, torch.stack(logits))


def _load(path: Path) -> Any:
    with _quiet():
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

        if path.is_dir():
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: PLC0415

        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # from_pretrained() would ask for another package to do the same
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        model.load_state_dict(tensors)
        return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers warns about its own and its dependencies' deprecations, which are not ours to mend, and draws
    progress bars; importing it takes seconds, so it is imported in here only."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        yield

"""The seam for model families. A plug's file name is the Hugging Face `model_type`; its module has
`create(metadata, checkpoint, max_context) -> Model`, which takes all weights and refuses (ModelError) what
it would compute wrongly.
"""

from typing import Protocol

import torch

from engine.attention.base import Attention
from engine.kv_pool import KvPool
from engine.step_tensors import StepTensors


class Model(Protocol):
    """Weights and the function over a flat batch. Holds no state between steps: that is in the pool."""

    def forward(self, step: StepTensors, pool: KvPool, attention: Attention) -> torch.Tensor:
        """Write the KV of all tokens of the step into the pool; return float32 logits [drawing, vocab] of
        the tokens that draw."""

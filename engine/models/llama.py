"""The Llama family: grouped-query attention, SwiGLU, RMSNorm, rotary positions, no biases.

The torch runner loads it by the model's `model_type`. It computes; it never decides what is computed.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, linear, silu

from contracts.errors import ModelError
from engine.attention.base import Attention
from engine.kv_pool import KvPool
from engine.models.layers import RotaryTable, normalise, rotate
from engine.step_tensors import StepTensors
from engine.weights.checkpoint import Checkpoint
from text.metadata import ModelMetadata

# A tied checkpoint may carry its head as well, and old ones their rotary frequencies: neither is used.
_UNUSED = ("lm_head.weight", "rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * dim, hidden]
    output: torch.Tensor  # [hidden, heads * dim]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


class Llama:
    """See engine/models/base.py for the contract."""

    def __init__(self, metadata: ModelMetadata, checkpoint: Checkpoint, max_context: int) -> None:
        self._metadata = metadata
        table = (metadata.vocab_size, metadata.hidden_size)
        self._embedding = checkpoint.take("model.embed_tokens.weight", table)
        self._head = self._embedding if metadata.tie_embeddings else checkpoint.take("lm_head.weight", table)
        self._norm = checkpoint.take("model.norm.weight", (metadata.hidden_size,))
        self._layers = [_take_layer(metadata, checkpoint, index) for index in range(metadata.layers)]
        self._rotary = RotaryTable(metadata.rope_theta, metadata.head_dim, max_context)

    def forward(self, step: StepTensors, pool: KvPool, attention: Attention) -> torch.Tensor:
        eps = self._metadata.rms_norm_eps
        rotation = self._rotary.at(step.positions)
        hidden = embedding(step.tokens, self._embedding)  # [tokens, hidden]
        for index, layer in enumerate(self._layers):
            normed = normalise(hidden, layer.input_norm, eps)
            queries, keys, values = self._project(normed, layer, rotation)
            attention.write(pool.layer(index), keys, values, step.slots)
            mixed = attention.attend(pool.layer(index), queries, step.rows, self._metadata.head_dim**-0.5)
            hidden = hidden + linear(mixed.flatten(1), layer.output)
            gate, up = linear(normalise(hidden, layer.post_norm, eps), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, layer.down)
        last = normalise(hidden[step.drawing], self._norm, eps)
        return linear(last, self._head).float()

    def _project(
        self, normed: torch.Tensor, layer: _Layer, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [tokens, heads, dim], keys and values [tokens, kv_heads, dim], turned to their positions."""
        heads, kv_heads = self._metadata.heads, self._metadata.kv_heads
        states = linear(normed, layer.qkv).view(len(normed), -1, self._metadata.head_dim)
        turned = rotate(states[:, : heads + kv_heads], rotation)
        return turned[:, :heads], turned[:, heads:], states[:, heads + kv_heads :]


def create(metadata: ModelMetadata, checkpoint: Checkpoint, max_context: int) -> Llama:
    """The model with all its weights; positions below `max_context`. Raises ModelError."""
    if metadata.rope_dim != metadata.head_dim:
        raise ModelError(
            f"rotary positions over {metadata.rope_dim} of {metadata.head_dim} head dimensions are not supported"
        )
    model = Llama(metadata, checkpoint, max_context)
    checkpoint.refuse_unused(_UNUSED)
    return model


def _take_layer(metadata: ModelMetadata, checkpoint: Checkpoint, index: int) -> _Layer:
    hidden, inner = metadata.hidden_size, metadata.intermediate_size
    queries, keys = metadata.heads * metadata.head_dim, metadata.kv_heads * metadata.head_dim

    def take(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.take(f"model.layers.{index}.{name}.weight", shape)

    return _Layer(
        input_norm=take("input_layernorm", hidden),
        qkv=torch.cat(
            (
                take("self_attn.q_proj", queries, hidden),
                take("self_attn.k_proj", keys, hidden),
                take("self_attn.v_proj", keys, hidden),
            )
        ),
        output=take("self_attn.o_proj", hidden, queries),
        post_norm=take("post_attention_layernorm", hidden),
        gate_up=torch.cat((take("mlp.gate_proj", inner, hidden), take("mlp.up_proj", inner, hidden))),
        down=take("mlp.down_proj", hidden, inner),
    )

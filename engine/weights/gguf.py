"""Weights from a GGUF file, dequantised tensor by tensor. The torch runner opens it for `.gguf` models."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape

from contracts.errors import ModelError
from text.gguf_header import GgufTensor, read_gguf_header

_TYPES = {"F32": np.float32, "F16": np.float16, "Q8_0": np.uint8, "Q4_0": np.uint8, "Q4_1": np.uint8}
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufSource:
    """A TensorSource over a GGUF file. `heads` and `kv_heads` undo the order in which llama.cpp stores the rows
    of Llama's query and key projections (pairs of rotated dimensions side by side instead of in halves)."""

    def __init__(self, file: Path, heads: int, kv_heads: int) -> None:
        """Raises ModelError when the file is no whole GGUF file."""
        header = read_gguf_header(file)
        self._tensors = {_hugging_face_name(name): tensor for name, tensor in header.tensors.items()}
        self._bytes = np.memmap(file, np.uint8, mode="r")
        self._interleaved = (("self_attn.q_proj.weight", heads), ("self_attn.k_proj.weight", kv_heads))

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape[::-1]

    def read(self, name: str) -> torch.Tensor:
        rows = self._rows(self._tensors[name])
        for suffix, heads in self._interleaved:
            if name.endswith(suffix):
                rows = _in_halves(rows, heads)
        values = dequantize(rows, GGMLQuantizationType[self._tensors[name].type])
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def _rows(self, tensor: GgufTensor) -> npt.NDArray[np.generic]:
        """The stored values; for a quantised type [rows, bytes of a row]."""
        if tensor.type not in _TYPES:
            raise ModelError(f"tensor {tensor.name} has the quantisation {tensor.type}; supported: {', '.join(_TYPES)}")
        dtype = _TYPES[tensor.type]
        shape = tensor.shape[::-1]
        if dtype is np.uint8:
            try:
                shape = quant_shape_to_byte_shape(shape, GGMLQuantizationType[tensor.type])
            except ValueError as error:
                raise ModelError(f"tensor {tensor.name} cannot be {tensor.type}: {error}") from error
        return np.asarray(self._bytes[tensor.offset : tensor.offset + tensor.size]).view(dtype).reshape(shape)


def _in_halves(rows: npt.NDArray[np.generic], heads: int) -> npt.NDArray[np.generic]:
    """Rows of each head from interleaved pairs to two halves. Rows are quantised one by one, so whole rows move."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _hugging_face_name(name: str) -> str:
    """A name that is not in the tables stays as it is, so that nobody takes it and it is refused as unused."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, kind = rest.partition(".")
    if name.startswith("blk.") and part in _IN_LAYER:
        return f"model.layers.{block}.{_IN_LAYER[part]}.{kind}"
    return name

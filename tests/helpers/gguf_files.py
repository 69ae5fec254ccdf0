"""noise-llama as a GGUF file, in the way that llama.cpp writes Llamas."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from tests.helpers.checkpoints import BOS, EOS, FIRST_BYTE, Tensors, noise_config, noise_vocabulary

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    **{f"model.layers.{i}.{ours}.weight": f"blk.{i}.{part}.weight" for i in (0, 1) for ours, part in _PARTS.items()},
}


def write_noise_gguf(
    path: Path, tensors: Tensors, kind: str, extra: Mapping[str, npt.NDArray[np.float32]] | None = None
) -> None:
    """Matrices in the quantisation `kind`, norms in F32; query and key rows in llama.cpp's interleaved order."""
    config = noise_config()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocabulary = list(noise_vocabulary())
    writer.add_token_list(vocabulary)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if index < FIRST_BYTE else normal for index in range(len(vocabulary))])
    writer.add_token_merges([])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = _interleaved(values, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(GGUF_NAMES[name], values)
        else:
            writer.add_tensor(GGUF_NAMES[name], gguf.quantize(values, quantisation), raw_dtype=quantisation)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Row 2i of a head comes from i, row 2i + 1 from i + half."""
    half = rows.shape[0] // heads // 2
    order = [head * 2 * half + pair + side * half for head in range(heads) for pair in range(half) for side in (0, 1)]
    return rows[order]

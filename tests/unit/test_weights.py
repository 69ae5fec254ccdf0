"""Weights from safetensors and GGUF: names, shapes, quantisations, and refusals that name the tensor."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from contracts.errors import ModelError
from engine.weights.checkpoint import Checkpoint
from engine.weights.gguf import GgufSource
from engine.weights.safetensors import SafetensorsSource
from tests.helpers.checkpoints import make_noise_llama, noise_tensors, write_noise_variant
from tests.helpers.gguf_files import GGUF_NAMES, write_noise_gguf

QUERY = "model.layers.1.self_attn.q_proj.weight"


def opened(*files: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """A checkpoint over safetensors files."""
    return Checkpoint(SafetensorsSource(files), dtype)


def test_names_with_and_without_prefix_give_the_same(tmp_path: Path) -> None:
    tensors = noise_tensors()
    save_file(tensors, tmp_path / "with.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "no.safetensors")
    for name, tensor in tensors.items():
        for file in ("with.safetensors", "no.safetensors"):
            assert torch.equal(opened(tmp_path / file).take(name, tuple(tensor.shape)), tensor)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_come_in_the_dtype_of_the_computation(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    tensor = torch.randn(4, 6).to(stored)
    save_file({"model.norm.weight": tensor}, tmp_path / "w.safetensors")
    taken = opened(tmp_path / "w.safetensors", dtype=wanted).take("model.norm.weight", (4, 6))
    assert taken.dtype == wanted
    assert torch.equal(taken, tensor.to(wanted))


def test_weights_outlive_their_file(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"model.norm.weight": torch.ones(1 << 16)}, file)
    taken = opened(file).take("model.norm.weight", (1 << 16,))
    with file.open("r+b") as stream:
        stream.truncate(0)
    assert taken.sum() == 1 << 16


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = noise_tensors()
    del tensors[QUERY]
    write_noise_variant(tmp_path, tensors)
    with pytest.raises(ModelError, match=f"lack the tensor {QUERY}"):
        opened(tmp_path / "model.safetensors").take(QUERY, (64, 64))


def test_another_shape_names_the_tensor_and_both_shapes(tmp_path: Path) -> None:
    make_noise_llama(tmp_path)
    with pytest.raises(ModelError, match=rf"{QUERY} has shape \(64, 64\).*says \(64, 96\)"):
        opened(tmp_path / "model.safetensors").take(QUERY, (64, 96))


def test_a_dtype_that_is_no_weight_is_named(tmp_path: Path) -> None:
    save_file({QUERY: torch.ones(2, 2, dtype=torch.int8)}, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=f"{QUERY} is stored as I8"):
        opened(tmp_path / "w.safetensors").take(QUERY, (2, 2))


def test_a_cut_shard_is_named(tmp_path: Path) -> None:
    make_noise_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        opened(file)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_tensors_are_dequantised_and_in_the_order_of_hugging_face(tmp_path: Path, kind: str) -> None:
    tensors = noise_tensors()
    write_noise_gguf(tmp_path / "noise.gguf", tensors, kind)
    checkpoint = Checkpoint(GgufSource(tmp_path / "noise.gguf", heads=4, kv_heads=2), torch.float32)
    for name, tensor in tensors.items():
        taken = checkpoint.take(name, tuple(tensor.shape))
        assert torch.equal(taken, rounded(tensor, kind)), name
    checkpoint.refuse_unused(())


def rounded(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What a quantisation leaves of the values; rows are quantised one by one, norms not at all."""
    if tensor.ndim == 1:
        return tensor
    quantisation = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), quantisation), quantisation).copy())


def test_an_unknown_quantisation_names_tensor_and_type(tmp_path: Path) -> None:
    tensors = noise_tensors()
    write_noise_gguf(tmp_path / "noise.gguf", tensors, "Q5_0")
    checkpoint = Checkpoint(GgufSource(tmp_path / "noise.gguf", heads=4, kv_heads=2), torch.float32)
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q\.weight has the quantisation Q5_0"):
        checkpoint.take(QUERY, (64, 64))


def test_a_gguf_tensor_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    tensors = noise_tensors()
    write_noise_gguf(tmp_path / "noise.gguf", tensors, "F32", {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)})
    checkpoint = Checkpoint(GgufSource(tmp_path / "noise.gguf", heads=4, kv_heads=2), torch.float32)
    for name in GGUF_NAMES:
        checkpoint.take(name, tuple(tensors[name].shape))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q_norm\.weight"):
        checkpoint.refuse_unused(())

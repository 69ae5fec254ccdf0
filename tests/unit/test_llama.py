"""The Llama model: which tensors it takes, and which checkpoints it refuses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.errors import ModelError
from contracts.kv import KvLayout
from engine.attention.reference import create as create_attention
from engine.kv_pool import KvPool
from engine.models.llama import Llama, create
from engine.runners.base import Draw, Row, StepPlan
from engine.step_tensors import build_step
from engine.weights.checkpoint import Checkpoint
from engine.weights.safetensors import SafetensorsSource
from tests.helpers.checkpoints import Tensors, noise_tensors, write_noise_variant
from text.hf_metadata import read_hf_metadata


def load(directory: Path, tensors: Tensors, tied: bool = False, rope_dim: int = 16) -> Llama:
    """The model of a noise-llama with these tensors."""
    write_noise_variant(directory, tensors, tie_word_embeddings=tied)
    files = (directory / "model.safetensors",)
    metadata = replace(read_hf_metadata(directory, files, "noise"), rope_dim=rope_dim)
    return create(metadata, Checkpoint(SafetensorsSource(files), torch.float32), max_context=64)


def logits(model: Llama) -> torch.Tensor:
    """[1, vocab] after three tokens."""
    step = build_step(StepPlan((Row([9, 300, 44], 0, np.array([0]), Draw(0, 1, 0.0, 1.0, 0, None)),)), block_size=16)
    layout = KvLayout("m", "t", "n", "float32", layers=2, kv_heads=2, head_dim=16, block_size=16, rope="r")
    return model.forward(step, KvPool(layout, 1), create_attention())


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors under names with another prefix than `model.`."""
    return {
        prefix + name.removeprefix("model.") if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("head", [True, False])
def test_a_tied_model_uses_its_embeddings(tmp_path: Path, head: bool, prefix: str) -> None:
    tensors = noise_tensors()
    tied = {name: tensor for name, tensor in tensors.items() if head or name != "lm_head.weight"}
    untied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    model = load(tmp_path / "tied", prefixed(tied, prefix), tied=True)
    assert torch.equal(logits(model), logits(load(tmp_path / "untied", untied)))


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_an_untied_model_uses_its_head(tmp_path: Path, prefix: str) -> None:
    tensors = noise_tensors()
    result = logits(load(tmp_path, prefixed(tensors, prefix)))
    assert (result[:, :8] == 0).all()  # as in noise-llama's head, not in its embeddings
    del tensors["lm_head.weight"]
    with pytest.raises(ModelError, match=r"lack the tensor lm_head\.weight"):
        load(tmp_path, prefixed(tensors, prefix))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight"])
def test_a_tensor_that_it_does_not_use_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=name):
        load(tmp_path, noise_tensors() | {name: torch.ones(3)})


def test_old_rotary_frequencies_do_no_harm(tmp_path: Path) -> None:
    load(tmp_path, noise_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})


def test_partial_rotation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="8 of 16"):
        load(tmp_path, noise_tensors(), rope_dim=8)

"""What vLLM gets of a model in blocks: its weights in 8 bits."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.baselines.w8a8 import quantise, rounded


def test_a_weight_is_rounded_to_the_nearest_code_of_its_output() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = rounded(weight)
    error = (codes * scales.float() - weight.float()).abs()
    assert codes.dtype == torch.int8 and scales.shape == (8, 1)
    assert bool((error <= 0.51 * scales.float() + 1e-6).all())


def test_an_output_without_weights_stays_zero() -> None:
    codes, scales = rounded(torch.zeros(2, 4, dtype=torch.bfloat16))
    assert not codes.any() and bool((scales > 0).all())


def test_matrices_of_layers_are_rounded_and_all_else_stays(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.ones(4, 2),
        "model.layers.0.mlp.up_proj.weight": torch.ones(3, 2),
        "model.layers.0.input_layernorm.weight": torch.ones(2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    quantise(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {*tensors, "model.layers.0.mlp.up_proj.weight_scale"}
    assert [name for name, tensor in found.items() if tensor.dtype == torch.int8] == [
        "model.layers.0.mlp.up_proj.weight"
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama" and config["quantization_config"]["quant_method"] == "compressed-tensors"

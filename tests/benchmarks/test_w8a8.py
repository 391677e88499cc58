"""What vLLM gets of a model in blocks: its weights in 8 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from benchmarks.baselines.compare import _given
from benchmarks.baselines.rivals import Rivals
from benchmarks.baselines.w8a8 import quantise, rounded
from engine.config import load
from engine.weights.gguf.describe_process import describe
from engine.weights.gguf.file import read_gguf
from engine.weights.gguf.source import GgufSource
from tests.engine.weights.tiny_gguf import write_gguf


def test_a_weight_is_rounded_to_the_nearest_code_of_its_output_and_zeros_stay() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = rounded(weight)
    error = (codes * scales.float() - weight.float()).abs()
    assert codes.dtype == torch.int8 and scales.shape == (8, 1)
    assert bool((error <= 0.51 * scales.float() + 1e-6).all())
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
    for name in found.keys() - {"model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale"}:
        assert torch.equal(found[name], tensors[name])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama" and config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_a_folder_in_which_nothing_can_be_rounded_is_refused(tmp_path: Path) -> None:
    save_file({"transformer.h.0.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no matrix of a layer"):
        quantise(tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_vllm_gets_a_checkpoint_as_it_is_and_a_model_in_blocks_in_8_bits(tiny: str, tmp_path: Path) -> None:
    file, described, made = tmp_path / "tiny.gguf", tmp_path / "described", tmp_path / "made"
    write_gguf(file, Kind.Q8_0)
    described.mkdir()
    describe(read_gguf(file, "model=tiny"), described, "tiny", "Made for a test.")
    GgufSource.of(file, str(file)).write(described)
    checkpoint = _given(Rivals(tmp_path, [file]), load({"model": tiny}), made, 8)
    blocks = _given(Rivals(tmp_path), load({"model": str(described)}), made, 8)
    assert (checkpoint.type, checkpoint.model()) == ("bfloat16", tiny)
    tensors = load_file(Path(blocks.model()) / "model.safetensors")
    assert blocks.type == "int8" and any(tensor.dtype == torch.int8 for tensor in tensors.values())

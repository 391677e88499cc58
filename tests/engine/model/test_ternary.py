"""BitNet as bitnet.cpp publishes it: matrices of -1, 0 and 1 in two bits, with one scale each."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import dequantize
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.bitnet import pack_weights

from engine.core.errors import ModelError
from engine.core.params import SamplingParams
from engine.kernels.gemm.product import multiplies
from engine.model.decoder import LeanDecoder
from engine.model.loading import load_config, skeleton, weights_of
from engine.model.target import Target
from engine.weights.gguf.damage import DamagedTensors, check_tensors
from engine.weights.gguf.file import GgufFile, read_gguf
from tests.engine.model.test_gguf_families import TEXT
from tests.engine.test_exact import decoded, read
from tests.engine.weights.family_gguf import random_model, stored_as_i2_s, write_family
from tests.engine.weights.tiny_gguf import described_gguf

SIZES = {"hidden_size": 256, "intermediate_size": 512}
MATRIX = "blk.1.ffn_down.weight"


def model_and_file(folder: Path) -> tuple[Any, GgufFile]:
    """A random model whose matrices of layers are a number of bfloat16 times -1, 0 and 1, and its file."""
    model = random_model("bitnet b1.58", **SIZES)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and ".layers." in name:
            scale = parameter.abs().mean().bfloat16().float()
            parameter.data = (parameter / scale).round().clamp(-1, 1) * scale
    write_family(folder / "x.gguf", "bitnet b1.58", model, i2_s=True)
    return model, read_gguf(folder / "x.gguf", "model=x")


def packed_checkpoint(folder: Path, linear: str, mode: str) -> Path:
    """The random model as the hub stores it. linear, mode: transformers' names of what computes it."""
    model, state = random_model("bitnet b1.58", **SIZES), dict[str, Any]()
    for name, parameter in model.state_dict().items():
        if ".layers." not in name or parameter.dim() < 2 or mode == "online":
            state[name] = parameter.bfloat16()
            continue
        scale = parameter.abs().mean()
        state[name] = pack_weights((parameter / scale).round().clamp(-1, 1))
        state[f"{name}_scale"] = (1 / scale if linear == "bitlinear" else scale).bfloat16().reshape(1)
    del state["lm_head.weight"]
    quantised = {"quant_method": "bitnet", "linear_class": linear, "quantization_mode": mode}
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": ["BitNetForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_numbers_are_those_of_the_matrix_whole_and_by_rows(tmp_path: Path) -> None:
    model, file = model_and_file(tmp_path)
    tensor, expected = file.tensor(MATRIX), model.model.layers[1].mlp.down_proj.weight
    assert tensor is not None and tensor.size == 512 * 256 // 4 + 32 and "I2_S" in file.kinds
    for rows, raw in ((slice(None), file.read(tensor)), ([200, 3], file.read_rows(tensor, [200, 3]))):
        found = dequantize(raw.reshape(-1), Kind.TQ2_0).reshape(-1, 512)
        assert torch.equal(torch.from_numpy(found), expected[rows])


@pytest.mark.skipif(not multiplies(torch.bfloat16), reason="no product of ours runs on this processor")
@torch.inference_mode()
def test_the_model_runs_lean_in_two_bits_and_drafts_change_no_text(tmp_path: Path) -> None:
    model, file = model_and_file(tmp_path)
    folder = described_gguf(tmp_path / "x.gguf")
    weights = weights_of(file, skeleton(folder, load_config(folder)))
    for name, value in model.state_dict().items():
        assert torch.equal(weights.values(name).float(), value)
    target = Target.load(folder, kv_memory=1 << 22)
    assert isinstance(target.forward, LeanDecoder) and target.exact and target.weights == "tq2_0"
    logits = model(torch.tensor([TEXT])).logits[0]
    found = read(target, TEXT, 7)
    assert (found - logits).norm() < 0.03 * logits.norm()
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    plain = decoded(target, TEXT[:20], sampling)
    assert decoded(target, TEXT[:20], sampling, plain) == plain


@pytest.mark.skipif(not multiplies(torch.bfloat16), reason="no product of ours runs on this processor")
@pytest.mark.parametrize(
    ("linear", "mode"), [("autobitlinear", "offline"), ("bitlinear", "offline"), ("autobitlinear", "online")]
)
@torch.inference_mode()
def test_the_hubs_layout_runs_lean_and_drafts_change_no_text(linear: str, mode: str, tmp_path: Path) -> None:
    folder = str(packed_checkpoint(tmp_path, linear, mode))
    target = Target.load(folder, kv_memory=1 << 22)
    assert isinstance(target.forward, LeanDecoder) and target.exact
    for layer in target.forward.layers:
        assert [product.rounds for product in layer.products] == [True] * 4
        kinds = [one.layout.kind for product in layer.products if product.matmul for one in product.matmul.tiled]
        assert set(kinds) == {"TQ2_0"}
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    logits, found = stock(torch.tensor([TEXT])).logits[0].float(), read(target, TEXT, 7)
    assert torch.equal(read(target, TEXT, 1), found)
    assert (found - logits).norm() < 0.1 * logits.norm()  # rounding to 8 bits turns a little difference into a code's
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    plain = decoded(target, TEXT[:20], sampling)
    assert decoded(target, TEXT[:20], sampling, plain) == plain


def test_a_file_cut_in_a_matrix_of_one_scale_is_refused(tmp_path: Path) -> None:
    _, file = model_and_file(tmp_path)
    last = max(file.tensors, key=lambda tensor: tensor.offset)
    whole = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(whole[: file.parts[0].start + last.offset + last.size - 1])
    with pytest.raises(ModelError, match="model=x: the GGUF file is cut short"):
        read_gguf(tmp_path / "x.gguf", "model=x")


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e9])
def test_a_scale_that_is_no_number_of_sixteen_bits_is_damage(scale: float, tmp_path: Path) -> None:
    model, _ = model_and_file(tmp_path)
    stored = stored_as_i2_s(model.model.layers[1].mlp.down_proj.weight.detach().numpy()).tobytes()
    content = (tmp_path / "x.gguf").read_bytes()
    wrong = stored[:-32] + struct.pack("<f", scale) + stored[-28:]
    (tmp_path / "x.gguf").write_bytes(content.replace(stored, wrong))
    with pytest.raises(DamagedTensors, match=f"tensor '{MATRIX}' holds NaN or infinity"):
        check_tensors(read_gguf(tmp_path / "x.gguf", "model=x"))


def test_rows_that_are_no_whole_blocks_are_told_with_the_type_of_the_file(tmp_path: Path) -> None:
    model = random_model("bitnet b1.58")
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(np.sign(parameter.detach().numpy()))
    write_family(tmp_path / "x.gguf", "bitnet b1.58", model, i2_s=True)
    with pytest.raises(ModelError, match=r"of type I2_S has shape \["):
        read_gguf(tmp_path / "x.gguf", "model=x")

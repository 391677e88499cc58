"""gpt-oss as the hub has it: experts in MXFP4, which run in the bits of the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config import Config
from engine.core.errors import ModelError
from engine.core.params import SamplingParams
from engine.kernels.gemm.product import multiplies
from engine.kernels.layer.weights import ExpertMlp
from engine.model.decoder import LeanDecoder
from engine.model.loading import load_config, open_stored, skeleton, weights_of
from engine.model.target import Target
from engine.model.trial.activations import _sample
from engine.model.trial.check import lines_of
from engine.weights.quantised_weights import QuantisedCheckpoint
from engine.weights.resolve import target_folder
from tests.engine.test_exact import LENGTH, decoded, read, text_of
from tests.engine.tiny_families import build

EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a random model whose experts are packed."""
    monkeypatch.setenv("TALON_HOME", str(tmp_path / "home"))
    generator, folder = torch.Generator().manual_seed(0), tmp_path / "tiny"
    model = build("gpt-oss", "bfloat16")
    tensors: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = value + torch.randn(value.shape, generator=generator) * name.endswith("_bias") / 8
            continue
        experts, inputs, outputs = value.shape
        codes = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"] = codes
        tensors[f"{name}_scales"] = torch.randint(120, 124, codes.shape[:3], generator=generator, dtype=torch.uint8)
    folder.mkdir()
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": ["GptOssForCausalLM"]}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.to(tensor.dtype).contiguous() for name, tensor in tensors.items()},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    return folder


def prepared(checkpoint: Path) -> str:
    return target_folder(Config(model=str(checkpoint), device="cpu"))


def test_every_number_is_the_one_that_transformers_reads(checkpoint: Path) -> None:
    folder = prepared(checkpoint)
    stored, model = open_stored(Path(folder)), skeleton(folder, load_config(folder))
    assert stored is not None
    weights = weights_of(stored, model)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).state_dict()
    assert theirs[f"{EXPERTS}gate_up_proj"].std() > 0.02
    for name in theirs:
        assert torch.equal(weights.values(name), theirs[name]), name
    assert isinstance(stored, QuantisedCheckpoint)
    assert stored.elements == sum(value.numel() for value in theirs.values())
    assert {matrix.kind for matrix in _sample(stored)} == {"MXFP4"}, "by which rows of 8 bits are chosen"


@pytest.mark.skipif(not multiplies(torch.bfloat16), reason="no product of ours runs on this processor")
@torch.inference_mode()
def test_it_runs_lean_in_its_own_bits_and_drafts_change_no_text(checkpoint: Path) -> None:
    folder, text = prepared(checkpoint), text_of("gpt-oss", "bfloat16")
    target = Target.load(folder, device="cpu", kv_memory=1 << 22)
    assert isinstance(target.forward, LeanDecoder) and target.exact and target.weights == "mxfp4"
    mlps = [layer.weights.mlp for layer in target.forward.layers]
    assert all(isinstance(mlp, ExpertMlp) for mlp in mlps)
    for mlp in mlps:
        matrices = [part for product in [*mlp.gate_up, *mlp.down] for part in product.tiled]  # type: ignore[union-attr]
        assert {matrix.layout.kind for matrix in matrices} == {"MXFP4"}
    assert "experts in MXFP4" in dict(line.split(": ", 1) for line in lines_of(str(checkpoint)))["types"]
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    expected, found = stock(torch.tensor([text])).logits[0].float(), read(target, text, 7)
    error = (found - expected).pow(2).mean(1).median().sqrt()  # rounding may choose other experts
    assert torch.equal(read(target, text, 1), found) and error < 0.05 * expected.std()
    sampling = SamplingParams(max_tokens=LENGTH // 2, temperature=1.0, seed=3)
    plain = decoded(target, text[:20], sampling)
    assert decoded(target, text[:20], sampling, plain) == plain


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensor: tensor.fill_(255), "gate_up_proj holds NaN or infinity; get the file again"),
        (lambda tensor: tensor[:, :-1].contiguous(), "gate_up_proj_blocks is stored in another shape"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(checkpoint: Path, change: Any, told: str) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[f"{EXPERTS}gate_up_proj_scales"] = change(tensors[f"{EXPERTS}gate_up_proj_scales"])
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=told):
        Target.load(prepared(checkpoint), device="cpu", kv_memory=1 << 22)

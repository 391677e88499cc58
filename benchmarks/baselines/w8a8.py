"""Writes a model directory's weights in 8 bits for vLLM's integer products: W8A8, in the format of
`compressed-tensors`.

Every matrix of a layer has a scale for each output; activations get one for each token as they come. The embedding and
the output matrix stay as they are, as in the checkpoints that are published so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_LARGEST_CODE = 127
_ROUNDED = {"num_bits": 8, "type": "int", "symmetric": True}
_QUANTISATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_ROUNDED, "strategy": "channel", "dynamic": False},
            "input_activations": {**_ROUNDED, "strategy": "token", "dynamic": True},
        }
    },
}


def quantise(folder: Path) -> None:
    """Replace the weights of the directory. Raises ValueError if no matrix of its layers is found."""
    found = False
    for file in folder.glob("*.safetensors"):
        tensors: dict[str, Tensor] = {}
        for name, weight in load_file(file).items():
            if ".layers." in name and weight.dim() == 2 and weight.is_floating_point():
                codes, scales = rounded(weight)
                tensors |= {name: codes, f"{name}_scale": scales}
                found = True
            else:
                tensors[name] = weight
        save_file(tensors, unfinished := file.with_suffix(".new"), {"format": "pt"})  # the old file is still mapped
        unfinished.replace(file)
    if not found:
        raise ValueError(f"{folder}: no matrix of a layer is there to be rounded")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": _QUANTISATION}))


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [outputs, inputs] int8 and scales [outputs, 1] bfloat16, whose product is nearly the weight."""
    scales = (weight.float().abs().amax(dim=1, keepdim=True) / _LARGEST_CODE).clamp_min(1e-12).to(torch.bfloat16)
    codes = (weight.float() / scales.float()).round().clamp(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8)
    return codes, scales

"""`quantised.blocks`, next to a model's bfloat16 weights: its matrices in the blocks that they were made from.

A safetensors file under another name: vLLM loads every *.safetensors of a folder as weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.kernels.quantised import Quantised

NAME = "quantised.blocks"


def write_quantised(folder: Path, matrices: Iterable[tuple[str, Quantised]]) -> None:
    """matrices: each with the name of the weight that it stands for. Nothing is written if there are none."""
    stored: dict[str, Tensor] = {}
    for name, matrix in matrices:
        stored |= {f"{name}.codes": matrix.codes, f"{name}.scales": matrix.scales}
        if matrix.offsets is not None:
            stored[f"{name}.offsets"] = matrix.offsets
    if stored:
        save_file(stored, folder / NAME)


def read_quantised(folder: Path, model: Any) -> dict[int, Quantised]:
    """The matrices of the file next to the model's weights, by the weight's address; none if there is no such file."""
    try:
        stored = load_file(folder / NAME)
    except (OSError, SafetensorError):  # it only saves time: the weights are complete without it
        return {}
    found = {}
    for name, weight in model.named_parameters():
        codes, scales, offsets = (stored.get(f"{name}.{part}") for part in ("codes", "scales", "offsets"))
        if codes is not None and scales is not None:
            matrix = Quantised(codes, scales, offsets)
            if matrix.shape == weight.shape and matrix.whole:
                found[weight.data_ptr()] = matrix
    return found

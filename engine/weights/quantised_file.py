"""`quantised.blocks`, next to a model's bfloat16 weights: its matrices in the blocks that they were made from.

A safetensors file under another name: vLLM loads every *.safetensors of a folder as weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.kernels.quant.stored import StoredMatrix

NAME = "quantised.blocks"


def write_quantised(folder: Path, matrices: Iterable[tuple[str, StoredMatrix]]) -> None:
    """matrices: each with the name of the weight that it stands for. Nothing is written if there are none."""
    stored: dict[str, Tensor] = {}
    for name, matrix in matrices:
        stored[f"{name}.{matrix.kind}"] = torch.from_numpy(np.array(matrix.bytes_of_rows()))
    if stored:
        save_file(stored, folder / NAME)


def read_quantised(folder: Path, model: Any) -> dict[int, StoredMatrix]:
    """The matrices of the file next to the model's weights, by the weight's address; none if there is no such file."""
    try:
        stored = load_file(folder / NAME)
    except (OSError, SafetensorError):  # it only saves time: the weights are complete without it
        return {}
    weights, found = dict(model.named_parameters()), {}
    for full_name, rows in stored.items():
        name, _, kind = full_name.rpartition(".")
        if (weight := weights.get(name)) is not None:
            matrix = StoredMatrix(kind, rows.numpy())
            if _equal(matrix, weight.detach()):
                found[weight.data_ptr()] = matrix
    return found


def _equal(matrix: StoredMatrix, weight: Tensor) -> bool:
    """Whether the weight is that matrix, rounded to bfloat16."""
    try:
        return bool(matrix.shape == weight.shape and torch.equal(matrix.values().to(weight.dtype), weight))
    except (KeyError, ValueError):  # of no type that we know, or no whole blocks
        return False

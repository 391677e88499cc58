"""The matrices of a GGUF file in its own blocks.

The tensor that a weight was made from, and the order of its rows, are found by comparing rows, not names: transformers
renames tensors and permutes the rows of some. A matrix that is not the weight, bit for bit, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from torch import Tensor

from engine.kernels.quant.layouts import layout_of
from engine.kernels.quant.stored import StoredMatrix


def quantised_weights(gguf: Path, model: Any) -> Iterator[tuple[str, StoredMatrix]]:
    """The model's weights that the file has in blocks, by name, one at a time: all may not fit into memory."""
    tensors = [
        StoredMatrix.of(tensor.tensor_type.name, tensor.data, int(tensor.shape[0]))
        for tensor in GGUFReader(gguf).tensors
        if len(tensor.shape) == 2 and _is_coded(tensor.tensor_type.name)
    ]
    rows: dict[int, tuple[int, int]] = {}  # by a row's hash: its tensor, and its place there
    for number, tensor in enumerate(tensors):
        rows |= {row: (number, place) for place, row in enumerate(_hashes(tensor.values()))}
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and (made := _of_rows(weight.detach(), rows, tensors)):
            yield name, made


def _is_coded(kind: str) -> bool:
    try:
        return layout_of(kind).coded
    except KeyError:
        return False


def _of_rows(weight: Tensor, rows: dict[int, tuple[int, int]], tensors: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """The weight as rows of one of the tensors; None if it is not that."""
    places = [rows.get(row) for row in _hashes(weight)]
    there = [place for place in places if place is not None]
    if len(there) < len(places) or len({tensor for tensor, _ in there}) != 1:
        return None
    matrix = tensors[there[0][0]].reordered(np.array([place for _, place in there]))
    return matrix if torch.equal(matrix.values(), weight) else None


def _hashes(matrix: Tensor) -> list[int]:
    """A hash of each row; zeros of both signs count as equal."""
    matrix = matrix + 0.0
    return [hash(row.tobytes()) for row in matrix.contiguous().view(torch.uint16).numpy()]

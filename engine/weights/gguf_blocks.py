"""The matrices of a GGUF file in its own blocks, for `engine.kernels.quantised`.

The tensor that a weight was made from, and the order of its rows, are found by comparing rows, not names: transformers
renames tensors and permutes the rows of some. A matrix that is not the weight, bit for bit, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import Q4_K
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.quantised import Quantised
from engine.kernels.simd import LANES

Bytes = NDArray[np.uint8]


def quantised_weights(gguf: Path, model: Any) -> Iterator[tuple[str, Quantised]]:
    """The model's weights that the file has in blocks of one of the formats below, by name, one at a time: together
    they may not fit into memory.
    """
    tensors = [tensor for tensor in GGUFReader(gguf).tensors if _is_known(tensor)]
    rows: dict[int, tuple[int, int]] = {}  # by a row's hash: its tensor, and its place there
    for number, tensor in enumerate(tensors):
        rows |= {row: (number, place) for place, row in enumerate(_hashes(_read(tensor).values()))}
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and len(weight) % LANES == 0 and (made := _of_rows(weight.detach(), rows, tensors)):
            yield name, made


def _is_known(tensor: Any) -> bool:
    inputs, _ = _FORMATS.get(tensor.tensor_type.name, (0, None))
    return inputs > 0 and len(tensor.shape) == 2 and tensor.shape[0] % inputs == 0


def _read(tensor: Any) -> Quantised:
    inputs, read = _FORMATS[tensor.tensor_type.name]
    size = int(tensor.shape[1]), int(tensor.shape[0]) // inputs, -1
    return read(np.asarray(tensor.data).reshape(-1).view(np.uint8).reshape(size))


def _of_rows(weight: Tensor, rows: dict[int, tuple[int, int]], tensors: Sequence[Any]) -> Quantised | None:
    """The weight as rows of one of the tensors; None if it is not that."""
    places = [rows.get(row) for row in _hashes(weight)]
    there = [place for place in places if place is not None]
    if len(there) < len(places) or len({tensor for tensor, _ in there}) != 1:
        return None
    matrix = _read(tensors[there[0][0]]).rows(torch.tensor([place for _, place in there]))
    return matrix if torch.equal(matrix.values(), weight) else None


def _hashes(matrix: Tensor) -> list[int]:
    """A hash of each row; zeros of both signs count as equal."""
    matrix = matrix + 0.0
    return [hash(row.tobytes()) for row in matrix.contiguous().view(torch.uint16).numpy()]


def _half(raw: Bytes, at: int) -> Tensor:
    """[outputs, blocks] float16 at byte `at` of each block. raw: [outputs, blocks, bytes]."""
    return torch.from_numpy(raw[:, :, at : at + 2].copy().view(np.float16)[:, :, 0])


def _bits(raw: Bytes, bits: int, together: int) -> Bytes:
    """[outputs, blocks, bytes] -> [outputs, blocks, codes]: of `together` bytes, the lowest bits of each come first."""
    groups = raw.reshape(*raw.shape[:2], -1, 1, together)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts: Bytes = np.right_shift(groups, shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(*raw.shape[:2], -1)


def _codes(codes: Bytes) -> Tensor:
    return torch.from_numpy(codes.reshape(len(codes), -1).copy())


def _paired(codes: Bytes) -> Tensor:
    """Two codes of 4 bits to a byte."""
    return _codes(codes[:, :, 0::2] | codes[:, :, 1::2] << np.uint8(4))


def _q4_0(raw: Bytes) -> Quantised:
    scales = _half(raw, 0)
    return Quantised(_paired(_bits(raw[:, :, 2:], 4, 16)), scales, scales * -8)


def _q4_1(raw: Bytes) -> Quantised:
    return Quantised(_paired(_bits(raw[:, :, 4:], 4, 16)), _half(raw, 0), _half(raw, 2))


def _q5_0(raw: Bytes) -> Quantised:
    scales, codes = _half(raw, 0), _bits(raw[:, :, 6:], 4, 16) + 16 * _bits(raw[:, :, 2:6], 1, 1)
    return Quantised(_codes(codes).to(torch.int8), scales, scales * -16)


def _q5_1(raw: Bytes) -> Quantised:
    codes = _bits(raw[:, :, 8:], 4, 16) + 16 * _bits(raw[:, :, 4:8], 1, 1)
    return Quantised(_codes(codes).to(torch.int8), _half(raw, 0), _half(raw, 2))


def _q8_0(raw: Bytes) -> Quantised:
    scales = _half(raw, 0)
    return Quantised(_codes(raw[:, :, 2:]).view(torch.int8), scales, torch.zeros_like(scales))


def _q4_k(raw: Bytes) -> Quantised:
    return Quantised(_paired(_bits(raw[:, :, 16:], 4, 32)), *_scales_and_offsets(raw))


def _q5_k(raw: Bytes) -> Quantised:
    codes = _bits(raw[:, :, 48:], 4, 32) + 16 * _bits(raw[:, :, 16:48], 1, 32)
    return Quantised(_codes(codes).to(torch.int8), *_scales_and_offsets(raw))


def _q6_k(raw: Bytes) -> Quantised:
    codes = _bits(raw[:, :, :128], 4, 64) + 16 * _bits(raw[:, :, 128:192], 2, 32)
    scales = torch.from_numpy(raw[:, :, 192:208].copy()).view(torch.int8) * _half(raw, 208).float()[..., None]
    return Quantised(_codes(codes).to(torch.int8) - 32, scales.flatten(1), None)


def _scales_and_offsets(raw: Bytes) -> tuple[Tensor, Tensor]:
    """[outputs, inputs / 32] float32. Blocks of 256 inputs begin with two float16 and, for each 32 inputs, a 6-bit
    factor of each.
    """
    factors = Q4_K.get_scale_min(np.ascontiguousarray(raw[:, :, 4:16]).reshape(-1, 12))
    scales, offsets = (
        _half(raw, 2 * i).float()[..., None] * torch.from_numpy(factor).view(*raw.shape[:2], 8)
        for i, factor in enumerate(factors)
    )
    return scales.flatten(1), -offsets.flatten(1)


_FORMATS: dict[str, tuple[int, Callable[[Bytes], Quantised]]] = {
    "Q4_0": (32, _q4_0),
    "Q4_1": (32, _q4_1),
    "Q5_0": (32, _q5_0),
    "Q5_1": (32, _q5_1),
    "Q8_0": (32, _q8_0),
    "Q4_K": (256, _q4_k),
    "Q5_K": (256, _q5_k),
    "Q6_K": (256, _q6_k),
}
"""By the type's name: inputs of a block, and the function that reads such matrices."""

"""Experts of a checkpoint in MXFP4 (gpt-oss): codes of four bits in one tensor, an exponent for each 32 in another.

They are the numbers of GGUF's blocks of that type, in another order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ModelError
from engine.kernels.quant.stored import StoredMatrix
from engine.weights.checkpoint import CheckpointTensor
from engine.weights.stored_weights import Place, Unreadable

KIND = "MXFP4"
_CODES, _EXPONENTS = "_blocks", "_scales"
_PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""The parts of each parameter of experts, whose outputs lie in turn."""
_NONE = 255  # an exponent that stands for no number


def packed_place(name: str, shape: tuple[int, ...], tensors: Mapping[str, CheckpointTensor]) -> Place | None:
    """Return where the experts of this name are; None if they are not packed. shape: of the parameter, [experts,
    inputs, outputs]. Raises Unreadable if the tensors do not fit it.
    """
    codes, exponents = (tensors.get(f"{name}{end}") for end in (_CODES, _EXPONENTS))
    parts = _PARTS.get(name.rpartition(".")[2])
    if codes is None or exponents is None or parts is None:
        return None
    experts, inputs, outputs = shape
    if codes.shape != (experts, outputs, inputs // 32, 16) or exponents.shape != codes.shape[:3]:
        raise Unreadable(f"{codes.name} is stored in another shape")
    return Place(tuple(f"{name}:{part}" for part in parts), shape, in_turn=True)


def is_part(tensor: str) -> bool:
    """Return whether a place names a part of packed experts so."""
    return ":" in tensor


def a_part_of(tensor: CheckpointTensor) -> str:
    """Return how a place names the first part of the experts whose codes these are; "" if they are none."""
    name, codes, _ = tensor.name.partition(_CODES)
    return f"{name}:{_PARTS[name.rpartition('.')[2]][0]}" if codes else ""


def packed_rows(tensor: str, tensors: Mapping[str, CheckpointTensor]) -> StoredMatrix:
    """Return the outputs of one part of all experts, [experts * outputs, inputs]. tensor: as a place names it. Raises
    ModelError if an exponent is no number.
    """
    name, _, part = tensor.partition(":")
    parts = _PARTS[name.rpartition(".")[2]]
    codes, exponents = (_part(tensors[f"{name}{end}"], parts.index(part), len(parts)) for end in (_CODES, _EXPONENTS))
    if (exponents == _NONE).any():
        raise ModelError(f"model={tensors[name + _CODES].path}: {name} holds NaN or infinity; get the file again")
    blocks = np.empty((*exponents.shape, 17), np.uint8)
    blocks[..., 0] = exponents
    first, second = codes[..., :8], codes[..., 8:]  # two neighbours a byte; GGUF has those that lie 16 apart
    blocks[..., 1::2] = first & 15 | second << 4
    blocks[..., 2::2] = first >> 4 | second & 240
    return StoredMatrix(KIND, blocks.reshape(len(blocks), -1))


def _part(tensor: CheckpointTensor, part: int, parts: int) -> NDArray[np.uint8]:
    """Return one of the parts whose outputs lie in turn, [experts * outputs, ...]."""
    whole: NDArray[np.uint8] = tensor.stored(0, tensor.elements).reshape(-1, *tensor.shape[2:])
    return whole[part::parts]


def numbers_of(tensor: CheckpointTensor) -> int:
    """Return how many numbers of the model a tensor holds."""
    return 0 if tensor.name.endswith(_EXPONENTS) else 2 * tensor.elements

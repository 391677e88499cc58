"""Finds the damage that a GGUF file's tensors show: NaN and infinity, and zeros where a download stopped.

A download that was allocated and not finished has the right length and a right header, and ends in zeros.
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ModelError, shown
from engine.kernels.quant.layouts import QuantLayout, has_layout, layout_of
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.header import GgufTensor

_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Types of numbers, and the bits that are all set where a number is infinite or NaN."""
_AGAIN = "get the file again"
_AT_ONCE = 1 << 14  # blocks that are put together at a time


class DamagedTensors(ModelError):
    """A tensor holds NaN or infinity, or the file ends in zeros, as after an unfinished download."""


def check_tensors(file: GgufFile) -> list[str]:
    """Raise DamagedTensors for tensors that hold NaN or infinity, and for zeros at the end of a file. Returns the names
    of other tensors that hold zeros alone, biases aside: there are models with some. Reads all tensors.
    """
    zeros = set[str]()
    for tensor in file.tensors:
        raw = file.read(tensor)
        if not raw.any():
            zeros.add(tensor.name)
        elif not _has_numbers(raw, tensor):
            raise DamagedTensors(f"tensor {shown(tensor.name)} holds NaN or infinity; {_AGAIN}")
    for number, part in enumerate(file.parts):
        backwards = sorted((one for one in file.tensors if one.part == number), key=lambda one: -one.offset)
        if last := list(takewhile(lambda one: one.name in zeros, backwards)):
            raise DamagedTensors(
                f"{part.path.name} ends in zeros: {len(last)} of its tensors, {shown(last[-1].name)} first, hold "
                f"nothing else, as after a download that was not finished; {_AGAIN}"
            )
    return [tensor.name for tensor in file.tensors if tensor.name in zeros and not tensor.name.endswith(".bias")]


def _has_numbers(raw: NDArray[np.uint8], tensor: GgufTensor) -> bool:
    """Return whether all numbers of a tensor are finite: those of blocks are if their scales are."""
    kind = tensor.kind.name
    if kind in _EXPONENTS:
        number, exponent = _EXPONENTS[kind]
        return not bool(((raw.view(number) & exponent) == exponent).any())
    if not has_layout(kind) or (layout := layout_of(kind)).exponents:
        return True
    blocks = raw.reshape(tensor.elements // layout.inputs, -1)
    if layout.scale >= blocks.shape[1]:  # it is put together when a block is packed
        parts = (layout.whole(blocks[start : start + _AT_ONCE]) for start in range(0, len(blocks), _AT_ONCE))
        return all(_are_finite(part[:, layout.scale : layout.scale + 2]) for part in parts)
    return all(_are_finite(blocks[:, at : at + 2]) for at in _scales_of(layout))


def _scales_of(layout: QuantLayout) -> list[int]:
    """List where a block has its numbers of 16 bits."""
    return [layout.scale] if layout.offset is None else [layout.scale, layout.offset]


def _are_finite(halves: NDArray[np.uint8]) -> bool:
    """Return whether all numbers are finite. halves: [blocks, 2], the bytes of a float16 of each."""
    return not bool((halves[:, 1] & 0x7C == 0x7C).any())

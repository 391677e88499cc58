"""How a matrix in blocks lies in memory for products with rows of 8 bits, and how such rows do.

A weight is scale * (code - centre), or scale * code + offset, in groups of 32 inputs; or each half of a group has a
scale. In blocks of 256 inputs, a factor for each scale and offset is multiplied with a number of the block, exactly,
and the offset is subtracted. A tile is 16 outputs by the inputs of a block:

    scales    [1 or 2, 16] float16 or float32
    offsets   [16] of the same type, if there are any
    factors   [groups, 1 or 2, 16] bytes, if there are any: of the scale and the offset, or of the halves' scales
    codes     [groups, vectors, 16 outputs, 4 inputs]

Eight vectors hold a group's codes, a byte for each of four inputs. The lower four bits of vectors 0 to 3 share their
bytes with those of vectors 4 to 7. The fifth bits of all eight follow, vector i's as bit i; or the fifth and sixth
bits, first of vectors 0 to 3 and then of the others. Codes of 8 bits take whole bytes.

A row of x is rounded to codes of 8 bits in the same groups, of which each is

    codes     [32] int8
    scale     float32
    offset    float32: scale * the sum of the codes, what an offset of 1 contributes
    sums      [3] int32: minus the sum of all codes, and of those of each half, what a centre of 1 contributes

Groups lie so that a kernel reads on: [blocks of rows, groups, rows of the block].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from numba import njit
from torch import Tensor

from engine.kernels.quant.layouts import STEP as BLOCK_INPUTS
from engine.kernels.quant.layouts import QuantLayout
from engine.kernels.quant.pack import blocks_of
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.simd import LANES

VECTORS = 8
"""Vectors of codes in a group."""
ROW_GROUP_BYTES = BLOCK_INPUTS + 20
"""Of a group of a row of x."""
SCALE_AT, OFFSET_AT, SUMS_AT = BLOCK_INPUTS, BLOCK_INPUTS + 4, BLOCK_INPUTS + 8


@dataclass(frozen=True)
class Int8Layout:
    """bits: of a code: 4, 5, 6 or 8. offsets: whether there are any. halves: a scale for each half of a group. wide:
    scales and offsets are float32, otherwise float16. factors: blocks have 256 inputs, and groups factors.
    """

    bits: int
    offsets: bool = False
    halves: bool = False
    wide: bool = False
    factors: bool = False

    @property
    def number(self) -> int:
        """As a compile-time constant of kernels."""
        return self.bits | self.offsets << 4 | self.halves << 5 | self.wide << 6 | self.factors << 7

    @classmethod
    def of_blocks(cls, layout: QuantLayout) -> Int8Layout | None:
        """Of blocks of a file; None if no kernel multiplies their codes."""
        if not layout.coded or layout.values is not None:
            return None
        offsets, halves = layout.offset is not None, layout.group < BLOCK_INPUTS
        return cls(layout.bits, offsets, halves, factors=layout.factors is not None)

    @staticmethod
    def of_number(number: int) -> Int8Layout:
        return Int8Layout(number & 15, *(bool(number >> bit & 1) for bit in range(4, 8)))

    @property
    def centre(self) -> int:
        """The code that stands for 0, where there are no offsets."""
        return 0 if self.offsets else 1 << self.bits - 1

    @property
    def groups(self) -> int:
        """Of a tile."""
        return 8 if self.factors else 1

    @property
    def scales(self) -> int:
        """Scales of an output in a tile."""
        return 2 if self.halves and not self.factors else 1

    @property
    def number_bytes(self) -> int:
        """Bytes of the scales of 16 outputs."""
        return LANES * (4 if self.wide else 2)

    @property
    def factors_at(self) -> int:
        """Where in a tile its factors begin."""
        return self.number_bytes * (self.scales + self.offsets)

    @property
    def group_factors(self) -> int:
        """Factors of an output in a group."""
        return 0 if not self.factors else 2 if self.offsets or self.halves else 1

    @property
    def codes_at(self) -> int:
        """Where in a tile its codes begin."""
        return self.factors_at + LANES * self.groups * self.group_factors

    @property
    def code_bytes(self) -> int:
        """Of a group."""
        return LANES * BLOCK_INPUTS * self.bits // 8

    @property
    def tile_bytes(self) -> int:
        return self.codes_at + self.groups * self.code_bytes


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix [outputs, inputs], from which tiles are made. codes: [outputs, inputs] uint8. scales, offsets: [outputs,
    blocks, scales of a block] and [outputs, blocks]. factors: [outputs, groups, factors of a group] uint8; those of
    halves count from 128.
    """

    layout: Int8Layout
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    factors: Tensor | None = None

    @classmethod
    def of(cls, parts: Sequence[StoredMatrix]) -> CodedMatrix | None:
        """The outputs of all parts; None if they differ in their type, or no kernel multiplies such matrices."""
        if len({part.kind for part in parts}) != 1 or (layout := Int8Layout.of_blocks(parts[0].layout)) is None:
            return None
        made = [blocks_of(part) for part in parts]
        codes, scales, offsets, factors = (
            None if some[0] is None else torch.cat([part for part in some if part is not None])
            for some in zip(*made, strict=True)
        )
        assert codes is not None and scales is not None
        if factors is not None:
            factors = factors.unflatten(1, (-1, layout.group_factors))
        return cls(layout, codes, scales[..., None], offsets, factors)

    def rows(self, order: Tensor) -> CodedMatrix:
        """The matrix of these outputs, in that order."""
        offsets, factors = (None if part is None else part[order] for part in (self.offsets, self.factors))
        return CodedMatrix(self.layout, self.codes[order], self.scales[order], offsets, factors)

    def tiles(self) -> Tensor:
        """[outputs / 16, blocks, bytes] uint8. Outputs are a multiple of 16."""
        panels, groups = len(self.codes) // LANES, self.layout.groups
        blocks = self.scales.shape[1]
        numbers = self.scales if self.offsets is None else torch.cat([self.scales, self.offsets[..., None]], dim=2)
        parts = [numbers.view(panels, LANES, blocks, -1).permute(0, 2, 3, 1).contiguous().view(torch.uint8)]
        if self.factors is not None:
            parts.append(self.factors.view(panels, LANES, blocks, groups, -1).permute(0, 2, 3, 4, 1))
        codes = self.codes.view(panels, LANES, blocks, groups, VECTORS, 4).permute(0, 2, 3, 4, 1, 5)
        parts.append(_packed(codes, self.layout.bits))
        return torch.cat([part.flatten(2) for part in parts], dim=2).contiguous()


def _packed(codes: Tensor, bits: int) -> Tensor:
    """[panels, blocks, groups, bytes]. codes: [panels, blocks, groups, vectors, 16, 4] uint8."""
    if bits == 8:
        return codes.flatten(3)
    lower, upper = (codes & 15).unflatten(3, (2, 4)), codes >> 4
    parts = [(lower[:, :, :, 0] | lower[:, :, :, 1] << 4).flatten(3)]
    planes, width = {4: 0, 5: 1, 6: 2}[bits], bits - 4
    for some in upper.chunk(planes, dim=3) if planes else ():
        plane = torch.zeros_like(some[:, :, :, 0])
        for i, vector in enumerate(some.unbind(3)):
            plane |= vector << width * i
        parts.append(plane.flatten(3))
    return torch.cat(parts, dim=3)


@njit
def rows_at_once(left: int, most: int) -> int:
    """How many of the rows that are left to multiply next, at most `most`. The last block is not small: unpacking the
    codes costs as much as two rows.
    """
    return left if left <= most else min(most, left - most // 4)

"""The layouts in which matrices lie in memory, one for each GGUF type: adding a type is adding an entry to `LAYOUTS`.
They are compile-time constants of numba's kernels.

A number is `scale * value[code] + offset`, in groups of 16 or 32 neighbouring inputs. Blocks of 32 inputs hold scale
and offset as float16. Blocks of 256 hold a float16 of each, and for each group a factor of 6 or 8 bits by which it is
multiplied; the product with the offset is subtracted. A tile is 16 outputs by the inputs of a block and has the file's
own bits: factors of 6 bits take a byte, nothing else is wider.

    scales    [16] float16 (MXFP4: one byte, an exponent)
    offsets   [16] float16, if the type has them
    factors   [steps of 32 inputs, 2, 16] bytes, if the type has them: of the scale, then of the offset (of 16 inputs:
              of the first and of the second half; without offsets: [steps, 16])
    codes     [steps, words, 16] of 32 bits

There are two arrangements of codes. In pairs, for products of bfloat16, a word has codes of one output and of every
second input: lane `2 * (output % 8) + input % 2` of a vector holds an even or an odd input of the pairs 0 to 15 of a
step. So one vector with all but a few bits masked out has 8 outputs of a pair. By bits of a code, for outputs 0 to 7
(half 0) and 8 to 15 (half 1):

    4    word 2 * (pair // 8) + half holds eight pairs, from the lowest bits on
    8    word 2 * (pair // 4) + half holds four pairs, one in each byte
    6    word 3 * half + pair // 4 holds four pairs in the lower six bits of its bytes. The two upper bits of all three
         words, the lowest of a code first, are the codes of pairs 12 to 15
    5    words 0 to 4 hold pairs 0-3, 4-7, 8-11 of half 0 and pairs 0-3, 4-7 of half 1 in the lower five bits of their
         bytes. The upper bits 7 and 6 and 5 of words 0, 1, 2 are the lower three bits of the other pairs: 12-15 of
         half 0, 8-11 and 12-15 of half 1. Bits 5 and 6 of words 3 and 4 are the upper two of the first two of these,
         and bit 7 of words 3 and 4 those of the third

In quads, for integers, each of eight words of a step holds the codes of four inputs of one output, a byte each. The
lower four bits of words 0 to 3 share their bytes with those of words 4 to 7. The fifth bits of all eight follow, word
i's as bit i; or the fifth and sixth bits, first of words 0 to 3 and then of the others. Codes of 8 bits take whole
bytes, and signed ones count from 128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL, MXFP4
from numpy.typing import NDArray

from engine.kernels.amx import TILE_BYTES
from engine.kernels.simd import LANES

Bytes = NDArray[np.uint8]
STEP = 32
"""Inputs that the kernels multiply at a time."""


class Arrangement(IntEnum):
    """How codes lie in a tile: for products of bfloat16, or of integers. A compile-time constant of kernels."""

    PAIRS = 0
    QUADS = 1


class Plane(NamedTuple):
    """Where a block has `bits` bits of each code: from byte `at` on, `together` bytes hold the lowest bits of as many
    codes, then their next bits, and so on. up: where in the code they belong.
    """

    at: int
    bits: int
    together: int
    up: int = 0


@dataclass(frozen=True)
class QuantLayout:
    """kind: the GGUF type. planes: of its codes. values: what a code stands for; None: code - bias. scale, offset:
    where a block has them. group: inputs with a scale of their own. factors: reads [blocks, bytes] as bytes [blocks,
    factors], of which `factor_bias` is subtracted; for types with offsets, those of the scales first. signed: codes are
    signed, and 128 is added before the bias is subtracted.
    """

    kind: str
    bits: int
    planes: tuple[Plane, ...]
    bias: int = 0
    values: tuple[float, ...] | None = None
    scale: int = 0
    offset: int | None = None
    group: int = STEP
    factors: Callable[[Bytes], Bytes] | None = None
    factor_bias: int = 0
    signed: bool = False
    exponents: bool = False  # scales are exponents of 8 bits
    number: int = field(default=0, compare=False)

    @property
    def inputs(self) -> int:
        """Of a tile."""
        numbers: int = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]][0]
        return numbers if self.coded else STEP

    @property
    def coded(self) -> bool:
        """Whether it has codes, and not numbers."""
        return bool(self.planes)

    @property
    def steps(self) -> int:
        """Of a tile."""
        return self.inputs // STEP

    @property
    def step_factors(self) -> int:
        """Factors of an output in a step: of the scale and the offset, or of the scales of its halves."""
        return 0 if self.factors is None else 2 if self.offset is not None or self.group < STEP else 1

    @property
    def factors_at(self) -> int:
        """Where in a tile its factors begin."""
        return LANES * ((1 if self.exponents else 2) + (0 if self.offset is None else 2))

    @property
    def codes_at(self) -> int:
        """Where in a tile its codes begin."""
        return self.factors_at + LANES * self.steps * self.step_factors

    @property
    def code_bytes(self) -> int:
        """Of a step."""
        return LANES * STEP * self.bits // 8

    @property
    def tile_bytes(self) -> int:
        return self.codes_at + self.steps * self.code_bytes if self.coded else TILE_BYTES

    def tiles(self, inputs: int) -> int:
        """Of a panel."""
        return -(-inputs // self.inputs)


def _six_bits(blocks: Bytes) -> Bytes:
    """Q4_K, Q5_K: eight factors of the scales and eight of the offsets, four of them in each word."""
    scales, offsets, rest = np.ascontiguousarray(blocks[:, 4:16]).view(np.uint32).T
    low, lower, upper = np.uint32(0x3F3F3F3F), np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    four, two = np.uint32(4), np.uint32(2)
    words = [
        scales & low,
        rest & lower | scales >> two & upper,
        offsets & low,
        rest >> four & lower | offsets >> two & upper,
    ]
    return np.stack(words, axis=1).view(np.uint8)


def _signed(blocks: Bytes) -> Bytes:
    """Q6_K: sixteen signed factors, to which 128 is added."""
    factors: Bytes = blocks[:, 192:208] ^ np.uint8(128)
    return factors


def _in_two_places(blocks: Bytes) -> Bytes:
    """IQ4_XS: eight factors whose two upper bits are in one place and the others in another."""
    upper = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    lower = blocks[:, 4:8].repeat(2, axis=1) >> np.tile(np.array([0, 4], np.uint8), 4)
    factors: Bytes = (lower & np.uint8(15)) | (upper.astype(np.uint8) & np.uint8(3)) << np.uint8(4)
    return factors


def _numbered(*layouts: QuantLayout) -> tuple[QuantLayout, ...]:
    return tuple(QuantLayout(**{**vars(layout), "number": i}) for i, layout in enumerate(layouts))


_FOURS = (4, 16)  # bits, and bytes together
LAYOUTS = _numbered(
    QuantLayout("BF16", 16, ()),
    QuantLayout("Q4_0", 4, (Plane(2, *_FOURS),), bias=8),
    QuantLayout("Q4_1", 4, (Plane(4, *_FOURS),), offset=2),
    QuantLayout("Q5_0", 5, (Plane(6, *_FOURS), Plane(2, 1, 1, 4)), bias=16),
    QuantLayout("Q5_1", 5, (Plane(8, *_FOURS), Plane(4, 1, 1, 4)), offset=2),
    QuantLayout("Q8_0", 8, (Plane(2, 8, 32),), bias=128, signed=True),
    QuantLayout("Q4_K", 4, (Plane(16, 4, 32),), offset=2, factors=_six_bits),
    QuantLayout("Q5_K", 5, (Plane(48, 4, 32), Plane(16, 1, 32, 4)), offset=2, factors=_six_bits),
    QuantLayout(
        "Q6_K",
        6,
        (Plane(0, 4, 64), Plane(128, 2, 32, 4)),
        bias=32,
        scale=208,
        group=16,
        factors=_signed,
        factor_bias=128,
    ),
    QuantLayout("IQ4_NL", 4, (Plane(2, *_FOURS),), values=IQ4_NL.kvalues),
    QuantLayout("IQ4_XS", 4, (Plane(8, *_FOURS),), values=IQ4_NL.kvalues, factors=_in_two_places, factor_bias=32),
    QuantLayout("MXFP4", 4, (Plane(1, *_FOURS),), values=MXFP4.kvalues, exponents=True),
)
"""By number, which kernels know a layout by; the first is that of bfloat16."""
BFLOAT16_LAYOUT = LAYOUTS[0]
_BY_KIND = {layout.kind: layout for layout in LAYOUTS}
_BY_KIND |= dict.fromkeys(("F16", "F32"), BFLOAT16_LAYOUT)  # rounded


def has_layout(kind: str) -> bool:
    return kind in _BY_KIND


def layout_of(kind: str) -> QuantLayout:
    """The layout of matrices of that GGUF type. Raises KeyError if there is none."""
    return _BY_KIND[kind]

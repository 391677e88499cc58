"""The layouts in which matrices lie in memory, one for each GGUF type: adding a type is adding an entry to `LAYOUTS`.
They are compile-time constants of numba's kernels.

A number is `scale * value[code] + offset`, in groups of 16 or 32 neighbouring inputs. Blocks of 32 inputs hold scale
and offset as float16. Blocks of 256 hold a float16 of each, and for each group a factor of 3 to 8 bits by which it is
multiplied; the product with the offset is subtracted. A tile is 16 outputs by the inputs of a block and has the file's
own bits: factors of 6 bits take a byte, and numbers that a file looks up in fours or eights (IQ1, IQ2, IQ3) have a code
of 3 or 4 bits each (`engine.kernels.quant.grids`); nothing else is wider.

    scales    [16] float16 (MXFP4: one byte, an exponent)
    offsets   [16] float16, if the type has them
    factors   [steps of 32 inputs, kinds, 16] bytes, if the type has them: of the scale, of both halves of the step if
              groups are of 16 inputs, and then the same of the offset. Of 4 bits: two in a byte, the first half of a
              step's factors in the lower bits
    codes     [steps, words, 16] of 32 bits

There are three layouts of codes. In pairs, to be unpacked as bfloat16, a word has codes of one output and of every
second input: lane `2 * (output % 8) + input % 2` of a vector holds an even or an odd input of the pairs 0 to 15 of a
step. So one vector with all but a few bits masked out has 8 outputs of a pair. By bits of a code, for outputs 0 to 7
(half 0) and 8 to 15 (half 1):

    2    word `half` holds all pairs, from the lowest bits on
    3    words 0 and 1 hold pairs 0 to 9 of half 0 and of half 1. Word 2 holds pairs 10 to 15 of half 0, then 10 to 13
         of half 1 and the lower two bits of 14; the upper two bits of word 1 are the lower ones of its pair 15, and
         those of word 0 the third bits of both
    4    word 2 * (pair // 8) + half holds eight pairs, from the lowest bits on
    8    word 2 * (pair // 4) + half holds four pairs, one in each byte
    6    word 3 * half + pair // 4 holds four pairs in the lower six bits of its bytes. The two upper bits of all three
         words, the lowest of a code first, are the codes of pairs 12 to 15
    5    words 0 to 4 hold pairs 0-3, 4-7, 8-11 of half 0 and pairs 0-3, 4-7 of half 1 in the lower five bits of their
         bytes. The upper bits 7 and 6 and 5 of words 0, 1, 2 are the lower three bits of the other pairs: 12-15 of
         half 0, 8-11 and 12-15 of half 1. Bits 5 and 6 of words 3 and 4 are the upper two of the first two of these,
         and bit 7 of words 3 and 4 those of the third

In words of 16 bits, for AVX512-BF16 and AVX2, a vector has the same pairs of all outputs, in words `2 * output +
input % 2`.

    2    vector pair // 8 holds eight pairs, from the lowest bits on
    3    vector pair // 5 holds five; bit i of the last pair is the upper bit of vector i
    4    vector pair // 4 holds four pairs
    5    vector pair // 3 holds three; the last pair as of 3 bits
    6    vector pair // 2 holds two. The upper four bits of vectors 0 to 3 are the lower ones of pairs 12 to 15, whose
         upper two are the upper four bits of vectors 4 (of 12 and 13) and 5
    8    vector pair // 2 holds two

In quads, for integers, each of eight words of a step holds the codes of four inputs of one output, a byte each. The
lower four bits of words 0 to 3 share their bytes with those of words 4 to 7. The fifth bits of all eight follow, word
i's as bit i; or the fifth and sixth bits, first of words 0 to 3 and then of the others. Codes of 8 bits take whole
bytes, and signed ones count from 128. The lower two bits of codes of 2 and 3 bits share their bytes in fours: words 0,
2, 4 and 6 from the lowest bits on, and 1, 3, 5 and 7. The third bits follow as fifth ones do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL, MXFP4

from engine.kernels.amx import TILE_BYTES
from engine.kernels.quant import factors as read
from engine.kernels.quant import grids
from engine.kernels.quant.factors import Bytes as Bytes
from engine.kernels.simd import LANES

Factors = Callable[[Bytes], Bytes]
STEP = 32
"""Inputs that the kernels multiply at a time."""


class CodeLayout(IntEnum):
    """How codes lie in a tile: to be unpacked as bfloat16, multiplied as integers, or as floats. A compile-time
    constant of kernels.
    """

    PAIRS = 0
    QUADS = 1
    WORDS = 2


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
    """kind: the GGUF type. planes: of its codes. values: what a code stands for, in units; None: code - bias. scale,
    offset: where a block has them. group: inputs with a scale of their own. factors: reads [blocks, bytes] as bytes
    [blocks, factors], of which `factor_bias` is subtracted; for types with offsets, those of the scales first.
    factor_bits: of one in a tile, 4 or 8. odd: a factor f stands for 2f + 1. signed: codes are signed, and 128 is added
    before the bias is subtracted. appended: reads [blocks, bytes] as what follows a block as it is packed: codes that
    lie in no planes in the file, a byte each.
    """

    kind: str
    bits: int
    planes: tuple[Plane, ...]
    bias: int = 0
    values: tuple[int, ...] | None = None
    unit: float = 1.0
    scale: int = 0
    offset: int | None = None
    group: int = STEP
    factors: Factors | None = None
    factor_bias: int = 0
    factor_bits: int = 8
    odd: bool = False
    signed: bool = False
    exponents: bool = False  # scales are exponents of 8 bits
    appended: Callable[[Bytes], Bytes] | None = None
    number: int = field(default=0, compare=False)

    def whole(self, blocks: Bytes) -> Bytes:
        """Return a file's blocks [blocks, bytes] and what is appended to them: what planes, scales and factors are read
        from.
        """
        return blocks if self.appended is None else np.concatenate([blocks, self.appended(blocks)], axis=1)

    @property
    def table(self) -> tuple[float, ...]:
        """What each code stands for."""
        if self.values is not None:
            return tuple(self.unit * value for value in self.values)
        codes = np.arange(1 << self.bits)
        return tuple((codes.astype(np.int8) if self.signed else codes - self.bias).astype(float).tolist())

    @property
    def inputs(self) -> int:
        """Inputs of one tile."""
        numbers: int = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]][0]
        return numbers if self.coded else STEP

    @property
    def coded(self) -> bool:
        """Whether the type stores codes. The others store numbers."""
        return bool(self.planes)

    @property
    def steps(self) -> int:
        """Steps of one tile."""
        return self.inputs // STEP

    @property
    def halves(self) -> int:
        """Groups of one step."""
        return STEP // self.group

    @property
    def step_factors(self) -> int:
        """Factors of one output in a step: first those of its scales, then those of its offsets."""
        return 0 if self.factors is None else self.halves * (1 if self.offset is None else 2)

    @property
    def factor_bytes(self) -> int:
        """The bytes of a step's factors."""
        return LANES * self.step_factors * self.factor_bits // 8

    @property
    def factors_at(self) -> int:
        """Where in a tile its factors begin."""
        return LANES * ((1 if self.exponents else 2) + (0 if self.offset is None else 2))

    @property
    def codes_at(self) -> int:
        """Where in a tile its codes begin."""
        return self.factors_at + self.steps * self.factor_bytes

    @property
    def code_bytes(self) -> int:
        """The bytes of a step's codes."""
        return LANES * STEP * self.bits // 8

    @property
    def tile_bytes(self) -> int:
        return self.codes_at + self.steps * self.code_bytes if self.coded else TILE_BYTES

    def tiles(self, inputs: int) -> int:
        """Return the number of tiles of a panel."""
        return -(-inputs // self.inputs)


def _numbered(*layouts: QuantLayout) -> tuple[QuantLayout, ...]:
    return tuple(QuantLayout(**{**vars(layout), "number": i}) for i, layout in enumerate(layouts))


def _looked_up(kind: str, bits: int, values: tuple[int, ...], unit: float, **other: Any) -> QuantLayout:
    """Describe a type whose blocks of 256 inputs hold indices of a grid."""
    planes = (Plane(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1], 8, 256),)
    return QuantLayout(kind, bits, planes, values=values, unit=unit, factor_bits=4, odd=True, **other)


def _in_sixteens(
    kind: str, bits: int, planes: tuple[Plane, ...], bias: int, scale: int, factors: Factors, factor_bias: int
) -> QuantLayout:
    """Describe a type whose blocks of 256 inputs have a factor of the scale for each group of 16, and no offsets."""
    return QuantLayout(kind, bits, planes, bias, scale=scale, group=16, factors=factors, factor_bias=factor_bias)


_FOURS = (4, 16)  # bits, and bytes together
LAYOUTS = _numbered(
    QuantLayout("BF16", 16, ()),
    QuantLayout("Q4_0", 4, (Plane(2, *_FOURS),), bias=8),
    QuantLayout("Q4_1", 4, (Plane(4, *_FOURS),), offset=2),
    QuantLayout("Q5_0", 5, (Plane(6, *_FOURS), Plane(2, 1, 1, 4)), bias=16),
    QuantLayout("Q5_1", 5, (Plane(8, *_FOURS), Plane(4, 1, 1, 4)), offset=2),
    QuantLayout("Q8_0", 8, (Plane(2, 8, 32),), bias=128, signed=True),
    QuantLayout("Q4_K", 4, (Plane(16, 4, 32),), offset=2, factors=read.six_bits),
    QuantLayout("Q5_K", 5, (Plane(48, 4, 32), Plane(16, 1, 32, 4)), offset=2, factors=read.six_bits),
    _in_sixteens("Q6_K", 6, (Plane(0, 4, 64), Plane(128, 2, 32, 4)), 32, 208, read.signed, 128),
    QuantLayout("IQ4_NL", 4, (Plane(2, *_FOURS),), values=IQ4_NL.kvalues),
    QuantLayout("IQ4_XS", 4, (Plane(8, *_FOURS),), values=IQ4_NL.kvalues, factors=read.in_two_places, factor_bias=32),
    QuantLayout("MXFP4", 4, (Plane(1, *_FOURS),), values=MXFP4.kvalues, exponents=True),
    QuantLayout(
        "Q2_K", 2, (Plane(16, 2, 32),), scale=80, offset=82, group=16, factors=read.low_and_high, factor_bits=4
    ),
    _in_sixteens("Q3_K", 3, (Plane(32, 2, 32), Plane(0, 1, 32, 2)), 4, 108, read.in_three_places, 32),
    _looked_up("IQ3_XXS", 4, grids.IQ3_XXS, 1 / 4, factors=grids.iq3_xxs_factors, appended=grids.iq3_xxs_codes),
    _looked_up("IQ3_S", 4, grids.IQ3_S, 1.0, factors=grids.iq3_s_factors, appended=grids.iq3_s_codes),
    _looked_up("IQ2_XXS", 3, grids.IQ2, 1 / 8, factors=grids.iq2_xxs_factors, appended=grids.iq2_xxs_codes),
    _looked_up("IQ2_XS", 3, grids.IQ2, 1 / 8, group=16, factors=grids.iq2_xs_factors, appended=grids.iq2_xs_codes),
    _looked_up("IQ2_S", 3, grids.IQ2, 1 / 8, group=16, factors=grids.iq2_s_factors, appended=grids.iq2_s_codes),
    _looked_up("IQ1_S", 3, grids.IQ1, 1 / 8, factors=grids.iq1_s_factors, appended=grids.iq1_s_codes),
    _looked_up(
        "IQ1_M", 3, grids.IQ1, 1 / 8, scale=312, group=16, factors=grids.iq1_m_factors, appended=grids.iq1_m_rest
    ),
    QuantLayout("TQ1_0", 2, (Plane(54, 8, 256),), bias=1, scale=52, appended=grids.tq1_codes),
    QuantLayout("TQ2_0", 2, (Plane(0, 2, 32),), bias=1, scale=64),
)
"""By number, which kernels know a layout by; the first is that of bfloat16."""
BFLOAT16_LAYOUT = LAYOUTS[0]
_BY_KIND = {layout.kind: layout for layout in LAYOUTS}
_BY_KIND |= dict.fromkeys(("F16", "F32"), BFLOAT16_LAYOUT)  # rounded


def has_layout(kind: str) -> bool:
    return kind in _BY_KIND


def bits_in_memory(kind: str) -> float:
    """Return the bits of a weight of that GGUF type in memory, scales and factors included. A type without a layout
    takes those of bfloat16.
    """
    layout = _BY_KIND.get(kind, BFLOAT16_LAYOUT)
    return 8 * layout.tile_bytes / (LANES * layout.inputs)


def layout_of(kind: str) -> QuantLayout:
    """Return the layout of matrices of that GGUF type. Raises KeyError if there is none."""
    return _BY_KIND[kind]

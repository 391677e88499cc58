"""Matrices quantised in blocks and kept so: fewer bytes to read than the bfloat16 they stand for.

A GGUF file's weights are `scale * code + offset` in blocks of 32 neighbouring inputs, or `scale * code` in blocks of
16, rounded to bfloat16 when the model is converted. Dequantised just before they are multiplied, they are the same
bfloat16, bit for bit, so no answer changes. A forward over a few rows takes as long as reading its matrices, so it gets
faster. Scales have so few significant bits that a scale times a code is exact in float32: one rounding follows, whether
the offset is added by the same instruction or by another. Heads' matrices are rounded to codes when they are loaded
(`Quantised.nearest`), which may change drafts and never a text.

Tiles are laid out as `engine.kernels.gemm.matmul` reads them, 16 outputs by 32 inputs: first 16 scales and 16 offsets,
or the scales of the first half of the inputs and those of the second. Codes of 8 bits follow pair by pair of inputs,
for outputs 0 to 7 and then 8 to 15, inputs alternating. Codes of 4 bits lie in words of 32 bits, one for each output
and input of a pair. A word holds the codes of eight pairs, so one shift brings those of a pair to its lower end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from engine.kernels.amx import TILE_BYTES, pointer
from engine.kernels.simd import LANES, fused, integers

BLOCK_INPUTS = 32
_AT_ONCE = 4096  # rows that are quantised together, which bounds the memory
_NORMAL = 2.0**-14  # float16 has its full precision from here on
_PAIRS_OF_WORD = 8  # pairs whose codes of 4 bits a word holds
_BYTE, _INT, _FLOAT, _WORD = ir.IntType(8), ir.IntType(32), ir.FloatType(), ir.IntType(64)
_LANES_OF_FLOATS, _LANES_OF_INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


class Form(IntEnum):
    """The layout of a matrix's tiles: a compile-time constant of kernels."""

    BFLOAT16 = 0
    FOUR = 1
    EIGHT = 2  # as int8
    FOUR_WIDE = 3  # scales and offsets as float32; FOUR and EIGHT have float16
    EIGHT_WIDE = 4
    EIGHT_HALVES = 5  # two scales of float32, of 16 inputs each, and no offsets

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self in (Form.FOUR, Form.FOUR_WIDE) else 8

    @property
    def wide(self) -> bool:
        """Whether a tile's scales are float32."""
        return self in (Form.FOUR_WIDE, Form.EIGHT_WIDE, Form.EIGHT_HALVES)

    @property
    def head_bytes(self) -> int:
        """Bytes of a tile before its codes."""
        return 2 * LANES * (4 if self.wide else 2)

    @property
    def tile_bytes(self) -> int:
        if self is Form.BFLOAT16:
            return TILE_BYTES
        return self.head_bytes + LANES * BLOCK_INPUTS * self.bits // 8


@dataclass(frozen=True)
class Quantised:
    """A matrix [outputs, inputs]. codes: [outputs, inputs] int8, or [outputs, inputs / 2] uint8 of two codes of 4 bits,
    the first in the lower bits. scales, offsets: [outputs, inputs / 32] float16 or float32; without offsets, scales:
    [outputs, inputs / 16] float32.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    @classmethod
    def nearest(cls, weight: Tensor) -> Quantised:
        """The codes of 8 bits that are nearest to a matrix [outputs, inputs], inputs a multiple of 32. They miss it by
        half a percent.
        """
        parts = [_nearest(rows) for rows in weight.split(_AT_ONCE)]
        codes, scales = (torch.cat(part) for part in zip(*parts, strict=True))
        halves = scales.half()
        if not ((scales > 0) & (halves < _NORMAL)).any():
            scales = halves
        return cls(codes, scales, torch.zeros_like(scales))

    @property
    def form(self) -> Form:
        four, wide = self.codes.dtype == torch.uint8, self.scales.dtype == torch.float32
        if self.offsets is None:
            return Form.EIGHT_HALVES
        if wide:
            return Form.FOUR_WIDE if four else Form.EIGHT_WIDE
        return Form.FOUR if four else Form.EIGHT

    @property
    def shape(self) -> tuple[int, int]:
        outputs, stored = self.codes.shape
        return outputs, stored * 8 // self.form.bits

    @property
    def whole(self) -> bool:
        """Whether the shapes of its parts match."""
        outputs, inputs = self.shape
        numbers = outputs, inputs // (BLOCK_INPUTS // 2 if self.offsets is None else BLOCK_INPUTS)
        return all(part.shape == numbers for part in (self.scales, self.offsets) if part is not None)

    def values(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The matrix, exact as float32, rounded once as bfloat16."""
        codes = self.unpacked().float().unflatten(1, (self.scales.shape[1], -1))
        whole = codes * self.scales.float()[..., None]
        if self.offsets is not None:
            whole += self.offsets.float()[..., None]
        return whole.flatten(1).to(dtype)

    def unpacked(self) -> Tensor:
        """The codes [outputs, inputs], one byte each."""
        if self.form.bits == 8:
            return self.codes
        return torch.stack([self.codes & 15, self.codes >> 4], dim=2).flatten(1)

    def rows(self, order: Tensor) -> Quantised:
        """The matrix of these outputs, in that order."""
        offsets = None if self.offsets is None else self.offsets[order]
        return Quantised(self.codes[order], self.scales[order], offsets)

    @staticmethod
    def joined(parts: Sequence[Quantised | None]) -> Quantised | None:
        """One matrix of the outputs of several, if all are there and of the same form."""
        there = [part for part in parts if part is not None]
        if len(there) < len(parts) or len({part.form for part in there}) != 1:
            return None
        offsets = [part.offsets for part in there if part.offsets is not None]
        return Quantised(
            torch.cat([part.codes for part in there]),
            torch.cat([part.scales for part in there]),
            torch.cat(offsets) if offsets else None,
        )

    def tiles(self) -> Tensor:
        """[panels, steps, bytes] uint8, as the kernel reads it. Outputs are a multiple of 16."""
        panels, steps = self.shape[0] // LANES, self.shape[1] // BLOCK_INPUTS
        numbers = self.scales if self.offsets is None else torch.stack([self.scales, self.offsets], dim=2)
        head = numbers.view(panels, LANES, steps, 2).permute(0, 2, 3, 1).contiguous()
        # outputs as halves of 8, inputs as pairs: [panels, half, output, steps, pair, input of the pair]
        codes = self.unpacked().view(torch.uint8).view(panels, 2, 8, steps, 16, 2)
        if self.form.bits == 4:  # [panels, steps, group of pairs, half, output, input of the pair, byte, code]
            grouped = codes.view(panels, 2, 8, steps, 2, 4, 2, 2).permute(0, 3, 4, 1, 2, 7, 5, 6)
            codes = grouped[..., 0] | grouped[..., 1] << 4
        else:
            codes = codes.permute(0, 3, 4, 1, 2, 5)
        return torch.cat([head.view(torch.uint8).flatten(2), codes.flatten(2)], dim=2).contiguous()


def _nearest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [rows, inputs] int8 and scales [rows, inputs / 32] float32, as float16 holds them where it does."""
    blocks = rows.float().unflatten(1, (-1, BLOCK_INPUTS))
    scales = blocks.abs().amax(-1) / 127
    scales = torch.where(scales < _NORMAL, scales, scales.half().float())
    codes = (blocks / scales.clamp(min=1e-30)[..., None]).round().clamp(-127, 127)
    return codes.to(torch.int8).flatten(1), scales


@intrinsic(prefer_literal=True)
def unpack_tiles(context: Any, form: Any, tiles: Any, count: Any, place: Any) -> Any:
    """Unpack `count` consecutive tiles at `tiles` as bfloat16 to `place`, 1024 bytes each. form: a constant."""
    of = Form(form.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tiles, count, place = args[1:]
        with cgutils.for_range(builder, count) as loop:
            source = builder.add(tiles, builder.mul(loop.index, _WORD(of.tile_bytes)))
            unpack(builder, of, source, builder.add(place, builder.mul(loop.index, _WORD(TILE_BYTES))))
        return context.get_dummy_value()

    return types.void(form, types.int64, types.int64, types.int64), generate


def unpack(builder: ir.IRBuilder, form: Form, tile: ir.Value, place: ir.Value) -> None:
    """Unpack the tile at that address as bfloat16 to `place`."""
    for pair, numbers in enumerate(unpacked_pairs(builder, form, tile)):
        at = pointer(builder, builder.add(place, _WORD(64 * pair)), numbers.type)
        builder.store(numbers, at, align=4)


def unpacked_pairs(builder: ir.IRBuilder, form: Form, tile: ir.Value) -> Iterator[ir.Value]:
    """The pairs of inputs of the tile at that address, each as 32 bfloat16 numbers."""
    size = form.head_bytes // 2
    head = [_doubled(builder, builder.add(tile, _WORD(size * i)), form.wide) for i in range(2)]
    for pair in range(LANES):
        codes = _codes(builder, builder.add(tile, _WORD(form.head_bytes)), pair, form.bits)
        if form is Form.EIGHT_HALVES:
            scales = head[2 * pair // LANES]
            lower, upper = (builder.fmul(code, scale) for code, scale in zip(codes, scales, strict=True))
        else:
            lower, upper = (fused(builder, *numbers) for numbers in zip(codes, *head, strict=True))
        yield _rounded(builder, lower, upper)


def _doubled(builder: ir.IRBuilder, address: ir.Value, wide: bool) -> tuple[ir.Value, ir.Value]:
    """16 numbers of float32, or of float16, each twice: those of outputs 0 to 7, and of 8 to 15."""
    if wide:
        numbers = builder.load(pointer(builder, address, _LANES_OF_FLOATS), align=4)
    else:
        halves = builder.load(pointer(builder, address, ir.VectorType(ir.HalfType(), LANES)), align=2)
        numbers = builder.fpext(halves, _LANES_OF_FLOATS)
    first, second = (
        builder.shuffle_vector(numbers, numbers, ir.Constant(_LANES_OF_INTS, [at + i // 2 for i in range(LANES)]))
        for at in (0, 8)
    )
    return first, second


def _codes(builder: ir.IRBuilder, codes: ir.Value, pair: int, bits: int) -> tuple[ir.Value, ir.Value]:
    """A tile's codes of a pair of inputs, as float32. codes: address of all of them."""
    if bits == 4:
        group, place = divmod(pair, _PAIRS_OF_WORD)
        starts = (builder.add(codes, _WORD(64 * (2 * group + half))) for half in range(2))
        words = (builder.load(pointer(builder, start, _LANES_OF_INTS), align=4) for start in starts)
        lower, upper = (_number(builder, builder.lshr(word, integers(4 * place))) for word in words)
        return lower, upper
    kind = ir.VectorType(_BYTE, LANES)
    places = (pointer(builder, builder.add(codes, _WORD(LANES * (2 * pair + half))), kind) for half in range(2))
    signed = (builder.sext(builder.load(place, align=1), _LANES_OF_INTS) for place in places)
    lower, upper = (builder.sitofp(code, _LANES_OF_FLOATS) for code in signed)
    return lower, upper


def _number(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """The lower four bits of each lane, as float32: looked up, since conversions occupy the units that multiply."""
    kind = ir.FunctionType(_LANES_OF_FLOATS, [_LANES_OF_FLOATS, _LANES_OF_INTS])
    look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
    return builder.call(look_up, [ir.Constant(_LANES_OF_FLOATS, [float(i) for i in range(LANES)]), codes])


def _rounded(builder: ir.IRBuilder, lower: ir.Value, upper: ir.Value) -> ir.Value:
    """Two vectors as 32 bfloat16 numbers."""
    kind = ir.FunctionType(ir.VectorType(ir.IntType(16), 2 * LANES), [_LANES_OF_FLOATS] * 2)
    return builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [lower, upper], side_effect=False)

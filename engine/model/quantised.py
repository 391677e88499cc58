"""Matrices that were quantised in blocks, kept as they were: fewer bytes to read than the bfloat16 they stand for.

A GGUF file's weights are `scale * code + offset` in blocks of 32 neighbouring inputs, rounded to bfloat16 when the
model is made of them. Rebuilt just before they are multiplied they are the same bfloat16, bit for bit, so no answer
changes; a forward over a few rows, which takes as long as reading its matrices takes, gets faster.

Tiles are laid out as `engine.model.matmul` wants them, 16 outputs by 32 inputs: first the 16 scales and the 16 offsets
as float16, then for each pair of inputs the codes of outputs 0 to 7 and of 8 to 15, inputs alternating. With 4 bits the
first are the lower halves of 16 bytes and the second the upper ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from engine.model.amx import TILE_BYTES, pointer
from engine.model.simd import LANES, fused

BLOCK_INPUTS = 32
HEAD_BYTES = 64
"""Of a tile: its scales and offsets."""
_BYTE, _INT, _FLOAT, _WORD = ir.IntType(8), ir.IntType(32), ir.FloatType(), ir.IntType(64)
_LANES_OF_FLOATS, _LANES_OF_INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


@dataclass(frozen=True)
class Quantised:
    """A matrix [outputs, inputs]. codes: uint8 of 4 bits, or int8; scales, offsets: [outputs, inputs / 32] float16."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == torch.uint8 else 8

    def values(self) -> Tensor:
        """The matrix as bfloat16."""
        blocks = self.codes.float().unflatten(1, (-1, BLOCK_INPUTS))
        whole = blocks * self.scales.float()[..., None] + self.offsets.float()[..., None]
        return whole.flatten(1).to(torch.bfloat16)

    def rows(self, order: Tensor) -> Quantised:
        """Those of its outputs, in that order."""
        return Quantised(self.codes[order], self.scales[order], self.offsets[order])

    @staticmethod
    def joined(parts: Sequence[Quantised | None]) -> Quantised | None:
        """One matrix of the outputs of several, if all are there and of the same bits."""
        there = [part for part in parts if part is not None]
        if len(there) < len(parts) or len({part.codes.dtype for part in there}) != 1:
            return None
        return Quantised(
            *(torch.cat([getattr(part, name) for part in there]) for name in ("codes", "scales", "offsets"))
        )

    def tiles(self) -> Tensor:
        """[panels, steps, bytes] uint8, as the kernel reads it. Outputs are a multiple of 16."""
        panels, steps = self.codes.shape[0] // LANES, self.codes.shape[1] // BLOCK_INPUTS
        head = torch.stack([self.scales, self.offsets]).view(2, panels, LANES, steps).permute(1, 3, 0, 2).contiguous()
        # outputs as halves of 8, inputs as pairs: [panels, steps, pairs, half, output, input of the pair]
        codes = self.codes.view(torch.uint8).view(panels, 2, 8, steps, 16, 2).permute(0, 3, 4, 1, 2, 5).flatten(4)
        codes = (codes[:, :, :, 0] | codes[:, :, :, 1] << 4) if self.bits == 4 else codes.flatten(3)
        return torch.cat([head.view(torch.uint8).flatten(2), codes.flatten(2)], dim=2).contiguous()


def tile_bytes(bits: int) -> int:
    """Of a tile of so many bits a code."""
    return HEAD_BYTES + LANES * BLOCK_INPUTS * bits // 8


@intrinsic(prefer_literal=True)
def unpack_tiles(context: Any, bits: Any, tiles: Any, count: Any, place: Any) -> Any:
    """`count` tiles that follow each other at `tiles`, as bfloat16 to `place`, 1024 bytes each. bits: a constant."""
    width = bits.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tiles, count, place = args[1:]
        with cgutils.for_range(builder, count) as loop:
            source = builder.add(tiles, builder.mul(loop.index, _WORD(tile_bytes(width))))
            unpack(builder, width, source, builder.add(place, builder.mul(loop.index, _WORD(TILE_BYTES))))
        return context.get_dummy_value()

    return types.void(bits, types.int64, types.int64, types.int64), generate


def unpack(builder: ir.IRBuilder, bits: int, tile: ir.Value, place: ir.Value) -> None:
    """The tile at that address, as bfloat16 to `place`."""
    for pair, numbers in enumerate(unpacked_pairs(builder, bits, tile)):
        at = pointer(builder, builder.add(place, _WORD(64 * pair)), numbers.type)
        builder.store(numbers, at, align=4)


def unpacked_pairs(builder: ir.IRBuilder, bits: int, tile: ir.Value) -> Iterator[ir.Value]:
    """The pairs of inputs of the tile at that address, each as 32 bfloat16 numbers."""
    scales, offsets = (_doubled(builder, builder.add(tile, _WORD(32 * i))) for i in range(2))
    for pair in range(LANES):
        at = builder.add(tile, _WORD(HEAD_BYTES + pair * LANES * bits // 4))
        lower, upper = (
            fused(builder, code, scale, offset)
            for code, scale, offset in zip(_codes(builder, at, bits), scales, offsets, strict=True)
        )
        yield _rounded(builder, lower, upper)


def _doubled(builder: ir.IRBuilder, address: ir.Value) -> tuple[ir.Value, ir.Value]:
    """16 float16 numbers, each twice: those of outputs 0 to 7, and of 8 to 15."""
    halves = builder.load(pointer(builder, address, ir.VectorType(ir.HalfType(), LANES)), align=2)
    numbers = builder.fpext(halves, _LANES_OF_FLOATS)
    first, second = (
        builder.shuffle_vector(numbers, numbers, ir.Constant(_LANES_OF_INTS, [at + i // 2 for i in range(LANES)]))
        for at in (0, 8)
    )
    return first, second


def _codes(builder: ir.IRBuilder, address: ir.Value, bits: int) -> tuple[ir.Value, ir.Value]:
    """The codes of a pair of inputs, as float32."""
    kind = ir.VectorType(_BYTE, LANES)
    if bits == 4:
        both = builder.zext(builder.load(pointer(builder, address, kind), align=1), _LANES_OF_INTS)
        upper = builder.lshr(both, ir.Constant(_LANES_OF_INTS, [4] * LANES))
        return _number(builder, both), _number(builder, upper)
    places = (pointer(builder, builder.add(address, _WORD(LANES * i)), kind) for i in range(2))
    codes = (builder.sext(builder.load(place, align=1), _LANES_OF_INTS) for place in places)
    lower, upper = (builder.sitofp(code, _LANES_OF_FLOATS) for code in codes)
    return lower, upper


def _number(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """The lower four bits of each lane, as float32: looked up, since conversions want the units that multiply."""
    kind = ir.FunctionType(_LANES_OF_FLOATS, [_LANES_OF_FLOATS, _LANES_OF_INTS])
    look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
    return builder.call(look_up, [ir.Constant(_LANES_OF_FLOATS, [float(i) for i in range(LANES)]), codes])


def _rounded(builder: ir.IRBuilder, lower: ir.Value, upper: ir.Value) -> ir.Value:
    """Two vectors as 32 bfloat16 numbers."""
    kind = ir.FunctionType(ir.VectorType(ir.IntType(16), 2 * LANES), [_LANES_OF_FLOATS] * 2)
    return builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [lower, upper], side_effect=False)

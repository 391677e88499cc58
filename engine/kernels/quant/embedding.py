"""Rows of an embedding: of numbers, or of a matrix in tiles (`engine.kernels.quant`), held once if it is the output
matrix too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, literally, types
from numba.extending import intrinsic
from torch import Tensor

from engine.kernels.amx import TILE_BYTES
from engine.kernels.quant.layouts import STEP, CodeLayout, QuantLayout
from engine.kernels.quant.unpack import unpack_at
from engine.kernels.simd import (
    FLOAT32,
    LANES,
    byte_at,
    float16_at,
    half_at,
    int_at,
    multiply,
    numbers_at,
    put_float,
    put_half,
    splat,
    store,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import Kernel, address_of, kernel, num_threads, thread_id

EMBED = np.dtype(
    [
        (name, "i8")
        for name in (
            "tokens",  # [rows] int32, each below vocab
            "rows",
            "embedding",  # [vocab, hidden], or panels of tiles
            "residual",  # out: [rows, hidden] float32
            "hidden",
            "width",
            "panel_bytes",
        )
    ]
    + [("scale", "f4")]
)


@kernel(EMBED)
def embed_kernel(address: Any) -> None:
    """Write residual = scale * the tokens' rows of an embedding [vocab, hidden]."""
    work = carray(address, 1)[0]
    scale = splat(work.scale)
    for row in range(thread_id(), work.rows, num_threads()):
        source = work.embedding + int_at(work.tokens + 4 * row) * work.hidden * work.width
        place = work.residual + row * work.hidden * 4
        for at in range(0, work.hidden, LANES):
            store(multiply(numbers_at(source + at * work.width, work.width), scale), place + 4 * at, FLOAT32)


@cache
def tiled_embed_kernel(layout: QuantLayout, code_layout: CodeLayout) -> Kernel:
    """Return the kernel for an embedding in tiles of that layout."""
    return _of_pairs(layout) if code_layout is CodeLayout.PAIRS or not layout.coded else _of_codes(layout, code_layout)


def _of_pairs(layout: QuantLayout) -> Kernel:
    number = layout.number

    @kernel(EMBED, layout.kind)
    def compiled(address: Any) -> None:
        work, scratch = carray(address, 1)[0], _scratch()
        for row in range(thread_id(), work.rows, num_threads()):
            token = int_at(work.tokens + 4 * row)
            panel, output = work.embedding + token // LANES * work.panel_bytes, token % LANES
            place = work.residual + row * work.hidden * 4
            for step in range((work.hidden + STEP - 1) // STEP):
                _unpack(number, panel, step, scratch)
                for i in range(min(STEP, work.hidden - step * STEP)):
                    number_at = scratch + i // 2 * 4 * LANES + 4 * output + 2 * (i % 2)
                    put_float(place + 4 * (step * STEP + i), half_at(number_at) * work.scale)

    return compiled()


def _of_codes(layout: QuantLayout, code_layout: CodeLayout) -> Kernel:
    """Return the kernel for codes. Each operation is rounded as `gguf` does it."""
    bits, steps, tile_bytes, quads = layout.bits, layout.steps, layout.tile_bytes, code_layout is CodeLayout.QUADS
    values = np.arange(256) - 128 if layout.signed and quads else layout.table
    table = np.array(values, np.float32)
    codes_at, code_bytes, factors_at = layout.codes_at, layout.code_bytes, layout.factors_at
    offsets, factors, halves = layout.offset is not None, layout.step_factors, layout.halves
    factor_bias, exponents, odd, of_step = layout.factor_bias, layout.exponents, layout.odd, layout.factor_bytes
    fours = layout.factor_bits == 4

    @kernel(EMBED, f"{layout.kind}_{code_layout.name}")
    def compiled(address: Any) -> None:
        work = carray(address, 1)[0]
        for row in range(thread_id(), work.rows, num_threads()):
            token = int_at(work.tokens + 4 * row)
            panel, output = work.embedding + token // LANES * work.panel_bytes, token % LANES
            place = work.residual + row * work.hidden * 4
            for at in range(0, work.hidden, 4):
                step = at // STEP
                tile, inside, quad = panel + step // steps * tile_bytes, step % steps, at % STEP // 4
                offset = np.float32(-0.0)
                scale = _power_at(tile + output) if exponents else float16_at(tile + 2 * output)
                if offsets:
                    offset = float16_at(tile + 2 * (LANES + output))
                if factors:
                    first, kind = tile + factors_at + inside * of_step, quad // 4 if halves == 2 else 0
                    factor = _factor_at(first, kind * LANES + output, fours, of_step) - factor_bias
                    scale *= np.float32(2 * factor + 1 if odd else factor)
                    if offsets:
                        factor = _factor_at(first, (halves + kind) * LANES + output, fours, of_step)
                        offset = -(offset * np.float32(factor))
                here = tile + codes_at + inside * code_bytes + 4 * output
                for i in range(4):
                    code = _code_of_quad(bits, here, quad, i) if quads else _code_of_word(bits, here, 4 * quad + i)
                    number = place + 4 * (at + i)
                    put_half(number, scale * table[code] + offset)
                    put_float(number, half_at(number) * work.scale)

    return compiled()


@subroutine
def _factor_at(factors: int, index: int, fours: bool, size: int) -> Any:
    """Read a factor of a step. factors: their address. fours: whether they have 4 bits. size: of all, in bytes."""
    if fours:
        return byte_at(factors + index % size) >> (index // size * 4) & 15
    return byte_at(factors + index)


@subroutine
def _code_of_quad(bits: int, words: int, quad: int, byte: int) -> Any:
    """Return a code of an output's step. words: address of its first."""
    size, down = 4 * LANES, 8 * byte
    if bits == 8:
        return int_at(words + quad * size) >> down & 255
    if bits < 4:
        code = int_at(words + quad % 2 * size) >> (down + quad // 2 * 2) & 3
        return code | (int_at(words + 2 * size) >> (down + quad) & 1) << 2 if bits == 3 else code
    code = int_at(words + quad % 4 * size) >> (down + quad // 4 * 4) & 15
    if bits == 5:
        code |= (int_at(words + 4 * size) >> (down + quad) & 1) << 4
    if bits == 6:
        code |= (int_at(words + (4 + quad // 4) * size) >> (down + quad % 4 * 2) & 3) << 4
    return code


@subroutine
def _code_of_word(bits: int, words: int, number: int) -> Any:
    """Return a code of words that hold an output's even inputs in their lower halves, and the odd ones in the upper."""
    size, pair, odd = 4 * LANES, number // 2, number % 2 * 16
    together = 16 // bits
    if (bits == 3 or bits == 5) and pair == 15:
        code = 0
        for i in range(bits):
            code |= (int_at(words + i * size) >> (odd + 15) & 1) << i
        return code
    if bits == 6 and pair >= 12:
        low = int_at(words + (pair - 12) * size) >> (odd + 12) & 15
        return low | (int_at(words + (4 + (pair - 12) // 2) * size) >> (odd + 12 + 2 * (pair % 2)) & 3) << 4
    return int_at(words + pair // together * size) >> (odd + bits * (pair % together)) & ((1 << bits) - 1)


@subroutine
def _power_at(address: int) -> Any:
    """Return 2**(e - 128) for the exponent e there."""
    return np.float32(2.0 ** (float(byte_at(address)) - 128.0))


@subroutine
def _unpack(layout: int, panel: int, step: int, place: int) -> None:
    unpack_at(literally(layout), panel, step, place)


@intrinsic
def _scratch(context: Any) -> Any:
    """Return the address of scratch for a tile of bfloat16, until the caller returns."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            scratch = builder.alloca(ir.ArrayType(ir.IntType(8), TILE_BYTES))
        scratch.align = 64
        return builder.ptrtoint(scratch, ir.IntType(64))

    return types.int64(), generate


def read_rows(layout: QuantLayout, code_layout: CodeLayout, tiles: Tensor, inputs: int, indices: Tensor) -> Tensor:
    """Return [indices, inputs] bfloat16: rows of a matrix in tiles [panels, tiles, bytes]. Raises IndexError for any
    that does not exist.
    """
    tokens = indices.reshape(-1).to(torch.int32).contiguous()
    if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < len(tiles) * LANES):
        raise IndexError(f"rows are numbered from 0 to {len(tiles) * LANES - 1}")
    found, record = torch.empty(len(tokens), inputs, dtype=torch.float32), np.zeros(1, EMBED)
    record["tokens"], record["rows"], record["embedding"] = tokens.data_ptr(), len(tokens), tiles.data_ptr()
    record["residual"], record["hidden"] = found.data_ptr(), inputs
    record["panel_bytes"], record["scale"] = tiles[0].nbytes, 1
    tiled_embed_kernel(layout, code_layout)(address_of(record), len(tokens))
    return found.bfloat16()

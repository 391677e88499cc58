"""Models of instructions: each against its description in numpy, and kernels that are made of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from benchmarks.kernels.every import KernelCheck
from benchmarks.kernels.modelled import _VECTORS, MODELLED, _assembly
from benchmarks.kernels.modelled_tiles import _INSTRUCTIONS
from benchmarks.kernels.processors import PROCESSORS
from engine.core.child_environment import child_environment
from engine.kernels.amx import tile_sizes
from engine.kernels.simd import features, pointer

pytestmark = pytest.mark.skipif("+avx2" not in features(), reason="models need AVX2")
RANDOM = np.random.default_rng(0)
INTS, FLOATS = ir.VectorType(ir.IntType(32), 16), ir.VectorType(ir.FloatType(), 16)
BYTES, WORDS = ir.VectorType(ir.IntType(8), 64), ir.VectorType(ir.IntType(16), 32)
NUMBERS = (RANDOM.standard_normal((4, 16)) * 10.0 ** RANDOM.integers(-9, 9, (4, 16))).astype(np.float32)


def result(emit: Callable[..., ir.Value], *given: tuple[NDArray[Any], ir.Type]) -> NDArray[np.uint8]:
    """Return the 64 bytes that `emit` makes of up to three vectors, or addresses of memory."""

    @intrinsic
    def apply(context: Any, first: Any, second: Any, third: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            loaded = [
                at if isinstance(kind, ir.IntType) else builder.load(pointer(builder, at, kind), align=1)
                for at, (_, kind) in zip(args, given, strict=False)
            ]
            made = emit(builder, *loaded)
            builder.store(made, pointer(builder, args[3], made.type), align=1)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    @njit
    def run(first: int, second: int, third: int, out: int) -> None:
        apply(first, second, third, out)

    out, kept = np.zeros(64, np.uint8), [np.ascontiguousarray(array) for array, _ in given]
    addresses = [int(array.ctypes.data) for array in kept]
    run(*addresses, *[0] * (3 - len(addresses)), int(out.ctypes.data))
    return out


def assembly(line: str, places: str, made: ir.Type, *kinds: ir.Type) -> Callable[..., ir.Value]:
    return partial(_assembly, ir.InlineAsm(ir.FunctionType(made, list(kinds)), line, places))


def bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the numbers, rounded by torch."""
    rounded: NDArray[np.uint16] = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint16).numpy()
    return rounded


def test_products_of_four_codes_are_those_of_unsigned_and_signed_bytes() -> None:
    codes, x = RANDOM.integers(0, 256, 64, np.uint8), RANDOM.integers(-128, 128, 8, np.int8)
    sums = RANDOM.integers(-(1 << 30), 1 << 30, 16, np.int32)
    codes[:4], x[4:] = 255, -128
    emit = assembly("vpdpbusd 4($2){1to16}, $1, $0", "=&v,v,r,0,~{memory}", INTS, INTS, ir.IntType(64), INTS)
    found = result(emit, (codes, INTS), (x, ir.IntType(64)), (sums, INTS)).view(np.int32)
    expected = sums + (codes.reshape(16, 4).astype(np.int32) * x[4:].astype(np.int32)).sum(axis=1)
    assert found.tolist() == expected.tolist()


def test_a_broadcast_reads_four_bytes_from_memory() -> None:
    x = RANDOM.integers(-128, 128, 8, np.int8)
    emit = assembly("vpbroadcastd 4($1), $0", "=&v,r,~{memory}", INTS, ir.IntType(64))
    assert result(emit, (x, ir.IntType(64))).view(np.int8).tolist() == x[4:].tolist() * 16


def test_products_of_pairs_are_added_one_after_the_other_the_second_first() -> None:
    matrix, pair, sums = bfloat16(NUMBERS[:2].ravel()), bfloat16(NUMBERS[2:].ravel()), NUMBERS[0]
    emit = assembly("vdpbf16ps $1, $2, $0", "=v,v,v,0", FLOATS, INTS, INTS, FLOATS)
    found = result(emit, (pair, INTS), (matrix, INTS), (sums, FLOATS)).view(np.float32)
    expected = sums.astype(np.float64)
    for half in (1, 0):
        products = [
            (side[half::2].astype(np.uint32) << 16).view(np.float32).astype(np.float64) for side in (pair, matrix)
        ]
        expected = (expected + products[0] * products[1]).astype(np.float32).astype(np.float64)
    assert found.tolist() == expected.tolist()


def test_numbers_are_rounded_to_bfloat16_as_torch_does_and_nan_stays_nan() -> None:
    given = NUMBERS[0].copy()
    given[:5] = np.float32([np.nan, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8])
    emit = assembly("vcvtneps2bf16 $1, $0", "=v,v", ir.VectorType(ir.IntType(16), 16), FLOATS)
    found = result(emit, (given, FLOATS)).view(np.uint16)[:16]
    assert found[1:].tolist() == bfloat16(given)[1:].tolist()
    assert np.isnan((found[:1].astype(np.uint32) << 16).view(np.float32))
    both = assembly("vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", INTS, FLOATS, FLOATS)
    found = result(both, (NUMBERS[1], FLOATS), (NUMBERS[2], FLOATS)).view(np.uint16)
    assert found.tolist() == bfloat16(NUMBERS[1:3].ravel()).tolist()


@pytest.mark.parametrize("name", [name for name in _VECTORS if "perm" in name])
def test_a_look_up_ignores_higher_bits_of_a_place(name: str) -> None:
    words, two = ".hi." in name, "vpermi2var" in name
    kind, places_kind, number = (WORDS, WORDS, np.uint16) if words else (FLOATS, INTS, np.uint32)
    count = kind.count * (1 + two)
    table, places = RANDOM.integers(0, 1 << 16, count).astype(number), RANDOM.integers(0, 1 << 16, kind.count)
    operands = [(table[: kind.count], kind), (places.astype(number), places_kind)]
    found = result(_VECTORS[name], *operands, *[(table[kind.count :], kind)] * two).view(number)
    assert found.tolist() == table[places % count].tolist()


def test_bytes_are_looked_up_in_each_sixteen_of_the_table_and_a_place_s_highest_bit_gives_zero() -> None:
    table, places = RANDOM.integers(0, 256, 64, np.uint8), RANDOM.integers(0, 256, 64, np.uint8)
    found = result(_VECTORS["llvm.x86.avx512.pshuf.b.512"], (table, BYTES), (places, BYTES))
    expected = [0 if place & 128 else table[i // 16 * 16 + place % 16] for i, place in enumerate(places)]
    assert found.tolist() == expected


def test_tiles_hold_as_many_rows_as_they_are_told_and_their_product_takes_one_input_after_the_other() -> None:
    do: dict[str, Any] = {name: function for name, _, function in _INSTRUCTIONS}
    sizes, rows = tile_sizes([(None, 64), (None, 64), (16, 64)])[5], RANDOM.standard_normal((16, 32)).astype(np.float32)
    x, pairs = bfloat16(rows), bfloat16(RANDOM.standard_normal((16, 32)).astype(np.float32))
    sums, out = NUMBERS[[0] * 16].copy(), np.full((16, 16), 7, np.float32)

    @njit
    def multiply(sizes: int, sums: int, x: int, pairs: int, out: int) -> None:
        configure(sizes), load(0, sums, 64), load(1, x, 64), load(2, pairs, 64), dot(0, 1, 2), store(0, out, 64)

    configure, load, dot, store = (njit(do[name]) for name in ("ldtilecfg", "tileloadd64", "tdpbf16ps", "tilestored64"))
    multiply(*(int(array.ctypes.data) for array in (sizes, sums, x, pairs, out)))
    expected = sums[:5].copy()
    wide, matrix = ((side.astype(np.uint32) << 16).view(np.float32) for side in (x, pairs))
    for i in range(32):
        expected += wide[:5, i : i + 1] * matrix[i // 2, i % 2 :: 2]
    assert out[:5].tolist() == expected.tolist()
    assert (out[5:] == 7).all()


@pytest.mark.parametrize(("processor", "number"), [(PROCESSORS[0], 0), (PROCESSORS[3], 110)])
def test_a_kernel_made_of_models_agrees_with_its_definition(processor: Any, number: int) -> None:
    modelled = {MODELLED: ",".join(f"+{name}" for name in processor.has), "NUMBA_OPT": "0"}
    command = [sys.executable, "-m", "benchmarks.kernels.modelled", str(number)]
    done = subprocess.run(command, env=child_environment() | modelled, capture_output=True, check=True)
    (check,) = msgspec.json.decode(done.stdout, type=list[KernelCheck])
    assert check.difference == ""

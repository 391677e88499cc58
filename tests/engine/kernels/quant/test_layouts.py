"""Matrices kept in the blocks of a file: the same bits as the bfloat16 they stand for, in as few bytes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kernels.products import put_scales
from engine.kernels.gemm.matmul import Matmul, Unit, units
from engine.kernels.gemm.product import Product
from engine.kernels.quant.layouts import CodeLayout, layout_of
from engine.kernels.quant.pack import panels_of
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.quant.tiled import TiledMatrix
from tests.engine.kernels.quant.random_blocks import CODED, expected_values, in_fives, random_blocks, read_apart

pytestmark = pytest.mark.skipif(not units(), reason="this processor has none of our products")
BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 5.5,
    "Q5_1": 6,
    "Q8_0": 8.5,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.3125,
    "MXFP4": 4.25,
    "Q2_K": 2.625,
    "Q3_K": 3.5625,
    "IQ3_XXS": 4.1875,
    "IQ3_S": 4.1875,
    "IQ2_XXS": 3.1875,
    "IQ2_XS": 3.3125,
    "IQ2_S": 3.3125,
    "IQ1_S": 3.1875,
    "IQ1_M": 3.3125,
    "TQ1_0": 2.0625,
    "TQ2_0": 2.0625,
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    torch.set_num_threads(count)
    return count


@pytest.mark.parametrize("kind", CODED)
def test_a_matrix_in_tiles_has_the_values_of_the_gguf_package(kind: str) -> None:
    matrix = random_blocks(kind, 48, 768)
    expected = expected_values(matrix)
    order = torch.tensor([47, 0, 16, 15, 15, 31])
    assert torch.equal(matrix.values(), expected)
    assert torch.equal(matrix.rows(order), expected[order])
    assert torch.equal(TiledMatrix(panels_of(matrix)).rows(torch.arange(48)), expected)


EVERY_UNIT = [
    pytest.param(unit, id=unit.value, marks=pytest.mark.skipif(unit not in units(), reason=f"no {unit.value} here"))
    for unit in Unit
]
ROUNDING = pytest.mark.parametrize("unit", [unit for unit in EVERY_UNIT if unit.id == Unit.AMX.value])
"""The unit that rounds weights to bfloat16."""
WHOLE = pytest.mark.parametrize("unit", [unit for unit in EVERY_UNIT if unit.id != Unit.AMX.value])
"""The units that multiply codes as they are."""


@pytest.mark.parametrize("kind", CODED)
@ROUNDING
def test_a_product_has_the_bits_of_the_bfloat16_product(unit: Unit, kind: str, threads: int) -> None:
    matrix, bias = random_blocks(kind, 112, 512), torch.randn(112).bfloat16()
    found, expected = (Matmul(weight, bias, unit=unit) for weight in ([matrix], expected_values(matrix)))
    for rows in (1, 2, 4, 8, 9, 16, 17, 33, 65):
        x = torch.randn(rows, 512).bfloat16()
        assert torch.equal(found(x), expected(x))


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("unit", EVERY_UNIT)
@pytest.mark.parametrize("rows", [3, 20, 70])
def test_a_row_of_no_numbers_spoils_no_other(rows: int, unit: Unit, kind: str) -> None:
    product, x = Matmul([random_blocks(kind, 112, 512)], unit=unit), torch.randn(rows, 512).bfloat16()
    expected = product(x)
    x[1], x[-1, 300] = torch.nan, torch.inf
    found = product(x)
    assert torch.equal(found[2:-1], expected[2:-1]) and torch.equal(found[0], expected[0])
    assert found[1].isnan().all() and not found[-1].isfinite().any()


@ROUNDING
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_any_shape_has_the_bits_of_the_bfloat16_product(unit: Unit, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(CODED))
    outputs, blocks = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 5))
    rows, seed = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 1 << 20))
    gated = outputs % 32 == 0 and data.draw(st.booleans())
    inputs = layout_of(kind).inputs * blocks
    matrix, x = random_blocks(kind, outputs, inputs, seed), torch.randn(rows, inputs).bfloat16()
    expected = Matmul(expected_values(matrix), gated=gated, unit=unit)(x)
    assert torch.equal(Matmul([matrix], gated=gated, unit=unit)(x), expected)


def whole_numbers(kind: str, outputs: int, inputs: int, seed: int = 0) -> StoredMatrix:
    """A matrix whose scales are 1 and whose offsets are 2, times factors."""
    matrix, layout = random_blocks(kind, outputs, inputs, seed), layout_of(kind)
    blocks = matrix.raw.reshape(outputs, inputs // layout.inputs, -1)
    if layout.exponents:
        blocks[:, :, 0] = 128
    else:
        for at, number in ((layout.scale, 1.0), (layout.offset, 2.0)):
            if at is not None:
                put_scales(blocks, at, np.full(blocks.shape[:2], number, np.float16))
    return matrix


@WHOLE
@pytest.mark.parametrize("kind", CODED)
def test_codes_are_multiplied_without_rounding_them(kind: str, unit: Unit, threads: int) -> None:
    matrix = whole_numbers(kind, 112, 512)
    product, weight = Matmul([matrix], unit=unit), matrix.values(torch.float32).double()
    for rows in (1, 2, 4, 7, 8, 9, 16, 17, 33, 65):
        x = torch.randint(-3, 4, (rows, 512)).bfloat16()
        assert torch.equal(product(x), (x.double() @ weight.T).float().bfloat16())


@WHOLE
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_products_of_codes_are_those_of_their_values_for_any_shape(unit: Unit, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(CODED))
    outputs, blocks = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 5))
    rows, seed = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 1 << 20))
    inputs = layout_of(kind).inputs * blocks
    matrix, bias = whole_numbers(kind, outputs, inputs, seed), torch.randint(-9, 9, (outputs,)).bfloat16()
    x = torch.randint(-3, 4, (rows, inputs)).bfloat16()
    expected = x.double() @ matrix.values(torch.float32).double().T + bias.double()
    assert torch.equal(Matmul([matrix], bias, unit=unit)(x), expected.float().bfloat16())


@WHOLE
@pytest.mark.parametrize("kind", CODED)
def test_a_row_has_the_same_bits_among_any_others(kind: str, unit: Unit, threads: int) -> None:
    product, x = Matmul([random_blocks(kind, 112, 1024)], unit=unit), torch.randn(70, 1024).bfloat16()
    alone = torch.cat([product(row[None]) for row in x])
    for rows in (*range(2, 22), 31, 32, 33, 64, 70):
        order = torch.randperm(70)[:rows]
        assert torch.equal(product(x[order]), alone[order])


@WHOLE
@pytest.mark.parametrize("kind", CODED)
def test_a_product_of_codes_is_near_that_of_the_weights(kind: str, unit: Unit) -> None:
    matrix, x = random_blocks(kind, 64, 768), torch.randn(5, 768).bfloat16()
    expected = x.double() @ matrix.values(torch.float32).double().T
    found = Matmul([matrix], unit=unit)(x).double()
    assert (found - expected).norm() < 0.003 * expected.norm()


@WHOLE
def test_a_gate_is_applied_to_products_of_codes(unit: Unit) -> None:
    matrix, x = random_blocks("Q4_K", 64, 256), torch.randn(9, 256).bfloat16() / 16
    gate, up = (x.double() @ matrix.values(torch.float32).double().T).chunk(2, dim=1)
    found = Matmul([matrix], gated=True, unit=unit)(x).double()
    expected = torch.nn.functional.silu(gate) * up
    assert (found - expected).norm() < 0.005 * expected.norm()


@pytest.mark.parametrize("kind", CODED)
def test_a_matrix_takes_the_bits_of_the_file(kind: str) -> None:
    assert Matmul([random_blocks(kind, 64, 512)]).bytes * 8 / (64 * 512) == BITS[kind]


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.value)
def test_parts_of_different_types_are_one_product(unit: Unit, threads: int) -> None:
    kinds = {"Q4_K": 64, "Q6_K": 16, "Q8_0": 48, "BF16": 21}
    parts = [random_blocks(kind, outputs, 256) for kind, outputs in kinds.items() if kind != "BF16"]
    parts.append(StoredMatrix.of_numbers(torch.randn(kinds["BF16"], 256)))
    bias = torch.randn(149)
    for rows in (1, 12):
        x, product = torch.randn(rows, 256).bfloat16(), Matmul(parts, bias, unit=unit)
        alone = [
            Matmul([part], some, unit=unit)(x) for part, some in zip(parts, bias.split([64, 16, 48, 21]), strict=True)
        ]
        assert torch.equal(product(x), torch.cat(alone, dim=1))


def test_parts_that_share_a_panel_are_one_product_of_their_numbers() -> None:
    parts, x = [random_blocks("Q4_K", outputs, 256) for outputs in (24, 40)], torch.randn(3, 256).bfloat16()
    product = Matmul(parts)
    assert not product.coded
    assert torch.equal(product(x), Matmul(torch.cat([part.values() for part in parts]))(x))


@ROUNDING
@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("IQ3_S", "Q2_K"), ("Q8_0", "BF16")])
def test_a_gate_and_its_up_projection_of_two_types_are_gated_at_once(
    kinds: tuple[str, str], unit: Unit, threads: int
) -> None:
    weight, bias = torch.randn(112, 512), torch.randn(224).bfloat16()
    parts = [
        StoredMatrix.of_numbers(weight) if kind == "BF16" else random_blocks(kind, 112, 512, seed)
        for seed, kind in enumerate(kinds)
    ]
    found = Matmul(parts, bias, gated=True, unit=unit)
    expected = Matmul(torch.cat([part.values() for part in parts]), bias, gated=True, unit=unit)
    for rows in (1, 9, 70):
        x = torch.randn(rows, 512).bfloat16() / 64
        assert torch.equal(found(x), expected(x))


@pytest.mark.parametrize("unit", EVERY_UNIT)
@pytest.mark.parametrize("first", [True, False])
def test_a_gate_gives_the_bits_of_another_type_with_the_same_codes(first: bool, unit: Unit, threads: int) -> None:
    fours, fives = random_blocks("Q4_1", 80, 256), random_blocks("Q5_1", 80, 256, seed=1)
    parts = [fours, fives] if first else [fives, fours]
    found, expected = Matmul(parts, gated=True, unit=unit), Matmul([*map(in_fives, parts)], gated=True, unit=unit)
    for rows in (1, 9, 70):
        x = torch.randn(rows, 256).bfloat16() / 64
        assert torch.equal(found(x), expected(x))


def test_three_parts_or_halves_of_other_types_are_not_gated() -> None:
    parts = [random_blocks(kind, 32, 256) for kind in ("Q4_K", "Q6_K")]
    assert Product(parts, gated=True).gated and Product(parts[:1] * 2, gated=True).gated
    assert not Product([*parts, *parts], gated=True).gated
    assert not Product([parts[0], random_blocks("Q6_K", 64, 256)], gated=True).gated


def test_parts_of_other_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="no parts of one"):
        Matmul([random_blocks("Q8_0", 16, 32), random_blocks("Q8_0", 16, 64)])


@pytest.mark.parametrize("kind", ["F16", "F32", "BF16"])
def test_numbers_stay_numbers_of_16_bits(kind: str) -> None:
    weight = torch.randn(20, 96)
    raw = quantize(weight.numpy(), GGMLQuantizationType[kind])
    matrix = StoredMatrix.of(kind, raw, 96)
    expected = (weight.half() if kind == "F16" else weight).bfloat16()
    tiled = TiledMatrix(panels_of(matrix))
    assert tiled.tiles.nbytes == 2 * 32 * 96
    assert torch.equal(tiled.rows(torch.arange(20)), expected)


def test_rows_can_be_reordered_and_cut_without_reading_them() -> None:
    matrix = random_blocks("Q4_1", 32, 64)
    expected = expected_values(matrix)
    turned = matrix.reordered(np.arange(31, -1, -1))
    assert torch.equal(turned.values(), expected.flip(0))
    assert torch.equal(turned.row_slice(3, 9).values(), expected.flip(0)[3:9])
    assert torch.equal(turned.reordered(np.arange(31, -1, -1)).values(), expected)
    assert np.shares_memory(matrix.row_slice(3, 9).raw, matrix.raw)


def test_a_large_matrix_is_read_in_inference_mode_too() -> None:
    matrix = random_blocks("Q4_0", 4100, 1024)
    with torch.inference_mode():
        values = matrix.values()
    assert torch.equal(values, expected_values(matrix))


def test_rows_outside_of_a_matrix_are_refused() -> None:
    tiled = TiledMatrix(panels_of(random_blocks("Q4_0", 32, 64)))
    for index in (-1, 32):
        with pytest.raises(IndexError, match="from 0 to 31"):
            tiled.rows(torch.tensor([3, index]))


def test_bytes_that_are_no_rows_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="not rows"):
        StoredMatrix.of("Q8_0", np.zeros(35, np.uint8), 32)
    with pytest.raises(ValueError, match="not blocks of 256"):
        StoredMatrix.of("Q4_K", np.zeros(144, np.uint8), 96)


@pytest.mark.parametrize("kind", CODED)
def test_codes_scales_and_factors_can_be_read_apart(kind: str) -> None:
    matrix = random_blocks(kind, 5, 512)
    codes, scales, offsets = read_apart(matrix)
    numbers = codes.reshape(*scales.shape, -1) * scales.astype(np.float64)[..., None]
    if offsets is not None:
        numbers += offsets[..., None]
    found = torch.from_numpy(numbers.astype(np.float32)).bfloat16().reshape(5, 512)
    assert torch.equal(found, expected_values(matrix))


@pytest.mark.parametrize("code_layout", [CodeLayout.QUADS, CodeLayout.WORDS])
@pytest.mark.parametrize("kind", CODED)
def test_rows_are_read_from_every_layout(code_layout: CodeLayout, kind: str) -> None:
    matrix = random_blocks(kind, 37, 512)
    tiled = TiledMatrix(panels_of(matrix), code_layout)
    assert torch.equal(tiled.rows(torch.arange(37)), expected_values(matrix))


def test_the_document_lists_every_type_with_its_bits() -> None:
    text = (Path(__file__).parents[4] / "docs/design.md").read_text("utf8")
    told = re.findall(r"\b(\w+) (\d\.\d\d)(?: \((\d\.\d\d)\))?", text)
    found = {kind: (stored, held or stored) for kind, stored, held in told if kind in BITS}
    sizes = {kind: GGML_QUANT_SIZES[GGMLQuantizationType[kind]] for kind in CODED}
    assert found == {kind: (f"{8 * sizes[kind][1] / sizes[kind][0]:.2f}", f"{BITS[kind]:.2f}") for kind in CODED}

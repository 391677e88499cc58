"""Products with rows of 8 bits: the bits of a plain reference, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.gemm.int8.dots import PAIRS_OF_16_BITS, InstructionSet, instruction_sets
from engine.kernels.gemm.int8.layout import rows_at_once
from engine.kernels.gemm.int8.matmul import Int8Matmul
from engine.kernels.gemm.product import int8_matmul
from engine.kernels.quant.layouts import layout_of
from engine.kernels.quant.nearest import nearest
from tests.engine.kernels.gemm import int8_reference as reference
from tests.engine.kernels.quant.random_blocks import CODED, in_eights, random_blocks
from tests.grids import pairs

pytestmark = [
    pytest.mark.skipif(not instruction_sets(), reason="this processor has no integer products that we know"),
    pytest.mark.usefixtures("use_threads"),
]
SETS = [
    pytest.param(
        used,
        marks=pytest.mark.skipif(used not in instruction_sets(), reason=f"this processor has no {used.name}"),
        id=used.name,
    )
    for used in InstructionSet
]


def rows_of(count: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Rows with groups of very different sizes, and some of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs // 32, 32, generator=generator)
    x *= torch.randint(-12, 12, (count, inputs // 32, 1), generator=generator).float().exp2()
    return (x * (torch.rand(count, inputs // 32, 1, generator=generator) > 0.1)).flatten(1)


@pairs(kind=CODED, used=SETS, threads=[1, 2])
def test_every_layout_has_the_bits_of_the_reference_for_any_number_of_rows(
    kind: str, used: InstructionSet, threads: int
) -> None:
    matrix, x = random_blocks(kind, 48, 512), rows_of(35, 512)
    product = Int8Matmul([matrix], dtype=torch.float32, instructions=used)
    expected = reference.product(x.numpy(), matrix)
    for rows in (1, 2, 3, 4, 5, 8, 15, 16, 17, 20, 35):
        assert np.array_equal(product(x[:rows]).numpy(), expected[:rows])


@pytest.mark.parametrize("used", SETS)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_any_shape_has_the_bits_of_the_reference(used: InstructionSet, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(CODED))
    outputs, blocks = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 6))
    rows, seed = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 1 << 20))
    inputs = layout_of(kind).inputs * blocks
    matrix, x = random_blocks(kind, outputs, inputs, seed), rows_of(rows, inputs, seed)
    found = Int8Matmul([matrix], dtype=torch.float32, instructions=used)(x)
    assert np.array_equal(found.numpy(), reference.product(x.numpy(), matrix))


@pairs(used=SETS, rows=[*range(1, 22), 31, 32, 33, 48, 64, 65], threads=[1, 2])
def test_a_rows_bits_do_not_depend_on_its_place_or_the_rows_beside_it(
    used: InstructionSet, rows: int, threads: int
) -> None:
    matrix, x = random_blocks("Q4_1", 80, 192), rows_of(16, 192).bfloat16()
    product = Int8Matmul([matrix], torch.randn(80).bfloat16(), instructions=used)
    alone = torch.cat([product(row[None]) for row in x])
    order = torch.randperm(rows) % len(x)
    assert torch.equal(product(x[order]), alone[order])


@pairs(used=SETS, rows=[1, 3, 40], threads=[1, 2])
def test_parts_in_several_layouts_share_the_rows(used: InstructionSet, rows: int, threads: int) -> None:
    parts = [random_blocks(kind, 16 * (i + 1), 512, i) for i, kind in enumerate(("Q4_K", "Q6_K", "Q8_0"))]
    x, bias = rows_of(rows, 512), torch.randn(96)
    expected = np.concatenate([reference.product(x.numpy(), part) for part in parts], axis=1) + bias.numpy()
    assert np.array_equal(Int8Matmul(parts, bias, False, torch.float32, used)(x).numpy(), expected)


@pairs(used=SETS, kind=["Q4_0", "Q5_0", "Q8_0", "Q6_K"], byte=[0, 0x7F, 0x80, 0xFF])
def test_the_largest_codes_do_not_saturate(used: InstructionSet, kind: str, byte: int) -> None:
    of_256 = kind == "Q6_K"  # whose scales are at the end
    inputs = 256 if of_256 else 64
    x = torch.ones(3, inputs) * torch.tensor([[1.0], [-1.0], [2.0]])
    matrix = random_blocks(kind, 16, inputs)
    blocks = matrix.raw.reshape(16, 1 if of_256 else 2, -1)
    blocks[:, :, slice(192) if of_256 else slice(2, None)] = byte
    found = Int8Matmul([matrix], dtype=torch.float32, instructions=used)(x)
    assert np.array_equal(found.numpy(), reference.product(x.numpy(), matrix))


@pytest.mark.parametrize(("bits", "pairs"), PAIRS_OF_16_BITS.items())
def test_sums_of_16_bits_hold_the_largest_products(bits: int, pairs: int) -> None:
    assert pairs * 2 * ((1 << bits) - 1) * 127 < 1 << 15


@pytest.mark.parametrize("used", SETS)
def test_a_gate_is_applied_before_anything_is_rounded(used: InstructionSet) -> None:
    matrix, x = random_blocks("Q8_0", 96, 128), rows_of(5, 128) / 4096
    bias = torch.randn(96)
    gate, up = (torch.from_numpy(reference.product(x.numpy(), matrix)) + bias).chunk(2, dim=1)
    found = Int8Matmul([matrix], bias, True, torch.float32, used)(x)
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=1e-5, atol=1e-6)


@pairs(used=SETS, kind=CODED, number=[torch.nan, torch.inf, -torch.inf], place=[40, 127])
def test_a_row_of_no_numbers_is_none_itself_and_spoils_no_other(
    place: int, number: float, kind: str, used: InstructionSet
) -> None:
    matrix, x = random_blocks(kind, 32, 512), rows_of(20, 512)
    product = Int8Matmul([matrix], dtype=torch.float32, instructions=used)
    expected = product(x)
    x[7, place] = number
    others = [row for row in range(20) if row != 7]
    found = product(x)
    assert torch.equal(found[others], expected[others])
    assert found[7].isnan().all()


def test_rows_of_zeros_and_of_tiny_numbers_give_zeros() -> None:
    matrix = random_blocks("Q8_0", 32, 64)
    x = torch.cat([torch.zeros(1, 64), torch.full((1, 64), 1e-38)])
    assert torch.equal(Int8Matmul([matrix], dtype=torch.float32)(x), torch.zeros(2, 32))


@pytest.mark.parametrize("most", [4, 16])
@pytest.mark.parametrize("rows", [1, 4, 15, 16, 17, 19, 20, 33, 100])
def test_blocks_of_rows_fit_and_hold_all_rows(rows: int, most: int) -> None:
    blocks = []
    while sum(blocks) < rows:
        blocks.append(rows_at_once(rows - sum(blocks), most))
    assert sum(blocks) == rows and max(blocks) <= most
    assert len(blocks) == 1 or min(blocks) >= most // 4


def test_codes_of_8_bits_are_multiplied_as_they_are() -> None:
    weight, x = torch.randn(32, 96), torch.randn(4, 96).bfloat16()
    found = Int8Matmul([nearest(weight)])(x).float()
    torch.testing.assert_close(found, x.float() @ weight.T, rtol=0.02, atol=0.25)


@pytest.mark.parametrize("kind", CODED)
def test_blocks_of_a_file_are_multiplied_as_they_are(kind: str) -> None:
    parts, x = [random_blocks(kind, outputs, 512) for outputs in (16, 32)], rows_of(3, 512)
    found = Int8Matmul(parts, dtype=torch.float32)(x)
    expected = x.double() @ torch.cat([part.values(torch.float32) for part in parts]).double().T
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_types_that_differ_are_multiplied_apart() -> None:
    parts = [random_blocks(kind, 16, 256, seed=i) for i, kind in enumerate(("Q4_K", "Q6_K", "Q8_0"))]
    product = int8_matmul(parts, None, True, torch.float32)
    assert product is not None and not product.gated
    x = rows_of(3, 256)
    assert torch.equal(product(x), torch.cat([Int8Matmul([part], dtype=torch.float32)(x) for part in parts], dim=1))


@pytest.mark.parametrize("first", [True, False])
def test_a_gate_and_its_up_projection_of_two_types_are_gated_at_once(first: bool) -> None:
    fours, eights = random_blocks("Q4_0", 80, 256), random_blocks("Q8_0", 80, 256, seed=1)
    parts, bias = [fours, eights] if first else [eights, fours], torch.randn(160)
    found = int8_matmul(parts, bias, True, torch.float32)
    expected = int8_matmul([*map(in_eights, parts)], bias, True, torch.float32)
    assert found is not None and found.gated and expected is not None
    for rows in (1, 9, 70):
        x = rows_of(rows, 256) / 64
        assert torch.equal(found(x), expected(x))


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4.625), ("Q5_K", 5.625), ("Q8_0", 8.5)])
def test_a_matrix_takes_the_bits_of_its_codes_and_scales(kind: str, bits: float) -> None:
    assert Int8Matmul([random_blocks(kind, 32, 256)]).bytes / 1024 == bits

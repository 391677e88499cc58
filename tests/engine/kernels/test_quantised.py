"""Matrices kept in the blocks that they were quantised in: the same bits as the bfloat16 they stand for."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.gemm.matmul import Matmul, Unit, units
from engine.kernels.quantised import Form, Quantised

FORMS = [form for form in Form if form is not Form.BFLOAT16]
PAIRED = [unit for unit in units() if unit.paired]
multiplies = pytest.mark.skipif(not PAIRED, reason="this processor does not multiply bfloat16")


def random_matrix(form: Form, outputs: int, inputs: int) -> Quantised:
    """Scales are of few bits: see `engine.kernels.quantised`."""
    generator = torch.Generator().manual_seed(int(form))
    most = 128 if form is Form.EIGHT else 32
    if form.bits == 4:
        codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator).to(torch.uint8)
    else:
        codes = torch.randint(-most, most, (outputs, inputs), generator=generator).to(torch.int8)
    scales, offsets = torch.randn(2, outputs, inputs // 32, generator=generator).half()
    if form is Form.EIGHT_HALVES:
        factors = torch.randint(-128, 128, (outputs, inputs // 32, 2), generator=generator)
        return Quantised(codes, (scales[..., None].float() * factors).flatten(1), None)
    return Quantised(codes, *(some.float() * 63 if form.wide else some for some in (scales, offsets)))


@pytest.mark.parametrize("unit", PAIRED, ids=lambda unit: unit.value)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(80, 32, False), (48, 1536, False), (96, 576, True)])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_has_the_bits_of_the_bfloat16_product(
    unit: Unit, form: Form, outputs: int, inputs: int, gated: bool, rows: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    matrix, bias = random_matrix(form, outputs, inputs), torch.randn(outputs).bfloat16()
    x = torch.randn(rows, inputs).bfloat16()
    quantised = Matmul(matrix.values(), bias, gated, unit, matrix)
    assert quantised.form is form
    assert torch.equal(quantised(x), Matmul(matrix.values(), bias, gated, unit)(x))


@multiplies
def test_a_matrix_that_is_not_the_weight_is_not_used() -> None:
    matrix, x = random_matrix(Form.FOUR, 32, 64), torch.randn(3, 64).bfloat16()
    weight = matrix.values()
    weight[5, 7] += 1
    product = Matmul(weight, quantised=matrix)
    assert product.form is Form.BFLOAT16
    assert torch.equal(product(x), Matmul(weight)(x))


@multiplies
@pytest.mark.parametrize(("form", "bits"), list(zip(FORMS, (5, 9, 6, 10, 10), strict=True)))
def test_it_takes_less_room(form: Form, bits: int) -> None:
    matrix = random_matrix(form, 64, 512)
    assert Matmul(matrix.values(), quantised=matrix).bytes == 64 * 512 * bits / 8


def test_the_nearest_codes_miss_a_matrix_by_half_a_step_at_most() -> None:
    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    matrix[5, 32:64] = 0  # a block without a scale
    codes = Quantised.nearest(matrix)
    assert codes.form is Form.EIGHT and codes.whole
    step = matrix.float().unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    missed = (codes.values().float() - matrix.float()).unflatten(1, (-1, 32)).abs()
    rounded = matrix.float().abs().unflatten(1, (-1, 32)) / 256  # to bfloat16
    assert (missed <= 0.51 * step + rounded).all() and codes.values()[5, 32:64].eq(0).all()


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
def test_the_nearest_codes_of_small_numbers_are_as_near(size: float) -> None:
    matrix = (size * torch.randn(32, 64, generator=torch.Generator().manual_seed(3))).bfloat16()
    values = Quantised.nearest(matrix).values()
    assert (values.float() - matrix.float()).norm() < 0.01 * matrix.float().norm()


def test_matrices_of_one_form_are_joined_and_others_are_not() -> None:
    four, eight = random_matrix(Form.FOUR, 16, 64), random_matrix(Form.EIGHT, 16, 64)
    halves = random_matrix(Form.EIGHT_HALVES, 16, 64)
    for part in (four, halves):
        joined = Quantised.joined([part, part])
        assert joined is not None and torch.equal(joined.values(), torch.cat([part.values()] * 2))
    assert Quantised.joined([four, eight]) is None
    assert Quantised.joined([four, None]) is None

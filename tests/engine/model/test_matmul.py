from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from engine.model.matmul import Matmul, Unit, units
from engine.model.packed_linear import _cancelling

pytestmark = pytest.mark.skipif(not units(), reason="this processor has no unit that `Matmul` knows")
_ROWS = (*range(1, 36), 47, 48, 49, 63, 64, 65, 130, 513)
_SHAPES = [(960, 576), (576, 1536), (40, 24), (51, 100), (16, 32), (1, 1), (17, 33)]


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=list(Unit), ids=lambda unit: unit.value)
def unit(request: pytest.FixtureRequest) -> Unit:
    if request.param not in units():
        pytest.skip("this processor has no such unit")
    return Unit(request.param)


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 40])
def test_it_multiplies(unit: Unit, shape: tuple[int, int], biased: bool, rows: int) -> None:
    weight, x = torch.randn(shape).bfloat16(), torch.randn(rows, shape[1]).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if biased else None
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    found = Matmul(weight, bias, unit=unit)(x)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    torch.testing.assert_close(found.float(), expected, rtol=1 / 256, atol=1e-3)


@pytest.mark.parametrize("inputs", [576, 24])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_gate_is_applied_before_anything_is_rounded(unit: Unit, inputs: int, biased: bool, rows: int) -> None:
    weight, x = torch.randn(2 * 48, inputs).bfloat16() / 8, torch.randn(rows, inputs).bfloat16()
    bias = torch.randn(2 * 48).bfloat16() if biased else None
    gate, up = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).chunk(2, dim=1)
    found = Matmul(weight, bias, gated=True, unit=unit)(x)
    torch.testing.assert_close(found.float(), F.silu(gate) * up, rtol=1 / 128, atol=1e-3)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", _SHAPES)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    unit: Unit, shape: tuple[int, int], gated: bool, threads: int
) -> None:
    """With products whose true value is 0, so that all of the result is rounding. A gate of 1 lets them through."""
    x, weight = _cancelling(*shape, torch.bfloat16)
    bias = None
    if gated:
        outputs = -(-shape[0] // 16) * 16
        weight = torch.cat([weight.new_zeros(outputs, shape[1]), F.pad(weight, (0, 0, 0, outputs - shape[0]))])
        bias = torch.cat([weight.new_ones(outputs), weight.new_zeros(outputs)])
    matmul = Matmul(weight, bias, gated, unit)
    torch.set_num_threads(1)
    expected = torch.cat([matmul(row[None]) for row in x])
    torch.set_num_threads(threads)
    for rows in _ROWS:
        order = torch.randperm(rows) % len(x)
        assert torch.equal(matmul(x[order]), expected[order])


def test_a_row_of_no_numbers_spoils_no_other(unit: Unit) -> None:
    x, weight = torch.randn(40, 24).bfloat16(), torch.randn(40, 24).bfloat16()
    matmul = Matmul(weight, unit=unit)
    expected = matmul(x)
    x[7], x[20] = torch.nan, torch.inf
    whole = [row for row in range(40) if row not in (7, 20)]
    found = matmul(x)
    assert torch.equal(found[whole], expected[whole])
    assert found[7].isnan().all()


def test_nothing_is_written_outside_the_output(unit: Unit) -> None:
    weight = torch.randn(51, 100).bfloat16()
    matmul, x = Matmul(weight, unit=unit), torch.randn(37, 128).bfloat16()
    room = torch.full((39, 51), 7.0, dtype=torch.bfloat16)
    record = matmul.record(len(x), x.data_ptr(), room[1].data_ptr())
    scratch = torch.empty(2 * matmul.scratch_bytes, dtype=torch.uint8)
    record["scratch"] = scratch.data_ptr()
    matmul.kernel(record.ctypes.data, 4)
    assert (room[[0, -1]] == 7).all() and (room[1:-1] != 7).any(dim=1).all()


def test_products_of_other_libraries_beside_it_change_nothing(unit: Unit) -> None:
    """oneDNN has tiles of its own shape, which a thread keeps as long as nobody else shapes them."""
    weight, x = torch.randn(64, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    matmul = Matmul(weight, unit=unit)
    ours, theirs = matmul(x), F.linear(x, weight)
    for rows in (1, 7, 40, 16, 33):
        assert torch.equal(matmul(x[:rows]), ours[:rows])
        assert torch.equal(F.linear(x, weight), theirs)

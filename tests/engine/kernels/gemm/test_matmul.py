from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.gemm.matmul import NO_SCRATCH, Matmul, Unit, give_scratch, units
from engine.kernels.gemm.onednn import cancelling
from engine.kernels.gemm.vector_kernels import AT_ONCE, rows_at_once
from engine.kernels.quant.stored import StoredMatrix
from tests.engine.kernels.quant.random_blocks import random_blocks
from tests.grids import pairs

pytestmark = [
    pytest.mark.skipif(not units(), reason="this processor has no unit that `Matmul` knows"),
    pytest.mark.usefixtures("use_threads"),
]
Kind = tuple[Unit, torch.dtype]
_ROWS = (*range(1, 36), 47, 48, 49, 63, 64, 65, 130, 513)
_ROUNDED = {torch.bfloat16: 1 / 256, torch.float32: 1e-5}
_SHAPES = [(144, 576), (64, 1536), (40, 24), (51, 100), (16, 32), (1, 1), (17, 33)]


_KINDS = [
    (Unit.AMX, torch.bfloat16),
    (Unit.VECTORS, torch.bfloat16),
    (Unit.FMA, torch.bfloat16),
    (Unit.FMA, torch.float32),
]


_HERE = [
    pytest.param(
        (unit, dtype),
        id=f"{unit.value}-{dtype}".replace("torch.", ""),
        marks=pytest.mark.skipif(unit not in units(dtype), reason="this processor has no such unit"),
    )
    for unit, dtype in _KINDS
]
EACH_KIND = pytest.mark.parametrize("kind", _HERE)


@pairs(kind=_HERE, threads=[1, 2], shape=_SHAPES, biased=[False, True], rows=[0, 1, 3, 16, 17, 40])
def test_it_multiplies(kind: Kind, threads: int, shape: tuple[int, int], biased: bool, rows: int) -> None:
    unit, dtype = kind
    weight, x = torch.randn(shape).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if biased else None
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    found = Matmul(weight, bias, unit=unit)(x)
    assert found.dtype == dtype and found.shape == expected.shape
    torch.testing.assert_close(found.float(), expected, rtol=_ROUNDED[dtype], atol=1e-3)


@pairs(kind=_HERE, threads=[1, 2], inputs=[576, 24], biased=[False, True], rows=[1, 5, 33])
def test_a_gate_is_applied_before_anything_is_rounded(
    kind: Kind, threads: int, inputs: int, biased: bool, rows: int
) -> None:
    unit, dtype = kind
    weight, x = torch.randn(2 * 48, inputs).to(dtype) / 8, torch.randn(rows, inputs).to(dtype)
    bias = torch.randn(2 * 48).to(dtype) if biased else None
    gate, up = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).chunk(2, dim=1)
    found = Matmul(weight, bias, gated=True, unit=unit)(x)
    torch.testing.assert_close(found.float(), F.silu(gate) * up, rtol=2 * _ROUNDED[dtype], atol=1e-3)


@pairs(kind=_HERE, threads=[1, 2], gated=[False, True], shape=_SHAPES)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    kind: Kind, shape: tuple[int, int], gated: bool, threads: int
) -> None:
    """With products whose true value is 0, so that all of the result is rounding. A gate of 1 lets them through."""
    unit, dtype = kind
    x, weight = cancelling(*shape, dtype)
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


@pairs(kind=_HERE[:-1], threads=[1, 2], stored=["BF16", "Q4_K", "Q6_K", "Q8_0"], gated=[False, True])
def test_many_rows_of_many_outputs_have_the_bits_of_few(kind: Kind, stored: str, gated: bool, threads: int) -> None:
    """The rows of a prompt are multiplied, in bfloat16, in blocks of inputs by more panels than are kept at a time."""
    unit, _ = kind
    outputs, inputs, most = 16 * 74, 768, 65 if unit is not Unit.AMX else 700
    if stored == "BF16":
        inputs += 96  # the last block of inputs is shorter
        matrix = StoredMatrix.of_numbers(torch.randn(outputs, inputs))
    else:
        matrix = random_blocks(stored, outputs, inputs)
    x = torch.randn(most, inputs).bfloat16()
    matmul = Matmul([matrix], torch.randn(outputs), gated, unit)
    expected = torch.cat([matmul(rows) for rows in x.split(16)])
    for rows in (65, 81, 97, 130, most):
        if rows <= most:
            assert torch.equal(matmul(x[:rows]), expected[:rows])


@EACH_KIND
def test_a_row_of_no_numbers_spoils_no_other(kind: Kind) -> None:
    unit, dtype = kind
    x, weight = torch.randn(40, 24).to(dtype), torch.randn(40, 24).to(dtype)
    matmul = Matmul(weight, unit=unit)
    expected = matmul(x)
    x[7], x[20] = torch.nan, torch.inf
    whole = [row for row in range(40) if row not in (7, 20)]
    found = matmul(x)
    assert torch.equal(found[whole], expected[whole])
    assert found[7].isnan().all()


@EACH_KIND
def test_what_is_no_row_of_its_is_refused(kind: Kind) -> None:
    unit, dtype = kind
    matmul = Matmul(torch.randn(32, 64).to(dtype), unit=unit)
    for x in (torch.randn(2, 63).to(dtype), torch.randn(2, 64, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="the matrix takes 64 inputs"):
            matmul(x)


@EACH_KIND
def test_nothing_is_written_outside_the_output(kind: Kind) -> None:
    unit, dtype = kind
    weight = torch.randn(51, 100).to(dtype)
    matmul, x = Matmul(weight, unit=unit), torch.randn(37, 128).to(dtype)
    room = torch.full((39, 51), 7.0, dtype=dtype)
    record = matmul.record(len(x), x.data_ptr(), room[1].data_ptr())
    scratch = give_scratch(record, NO_SCRATCH)
    matmul.kernel(record.ctypes.data, 4)
    del scratch  # it had to last
    assert (room[[0, -1]] == 7).all() and (room[1:-1] != 7).any(dim=1).all()


@EACH_KIND
def test_products_of_other_libraries_beside_it_change_nothing(kind: Kind) -> None:
    """oneDNN has tiles of its own shape, which a thread keeps as long as nobody else shapes them."""
    unit, dtype = kind
    weight, x = torch.randn(64, 64).to(dtype), torch.randn(40, 64).to(dtype)
    matmul = Matmul(weight, unit=unit)
    ours, theirs = matmul(x), F.linear(x, weight)
    for rows in (1, 7, 40, 16, 33):
        assert torch.equal(matmul(x[:rows]), ours[:rows])
        assert torch.equal(F.linear(x, weight), theirs)


@pytest.mark.parametrize("rows", range(1, 40))
def test_many_rows_are_multiplied_in_groups_that_fit_and_are_not_tiny(rows: int) -> None:
    groups = []
    while sum(groups) < rows:
        groups.append(rows_at_once(rows - sum(groups)))
    assert sum(groups) == rows and max(groups) <= AT_ONCE
    assert len(groups) == 1 or min(groups) >= 4


def test_parts_whose_groups_are_of_other_sizes_do_not_disturb_each_other() -> None:
    """Their totals lie in the same memory: a thread may not begin with a part while another reads those of the last."""
    parts = [random_blocks(kind, 512, 1024) for kind in ("Q2_K", "Q4_K")]
    x = torch.randn(64, 1024).bfloat16()
    for unit in units():
        product = Matmul(parts, unit=unit)
        torch.set_num_threads(1)
        expected = product(x)
        torch.set_num_threads(2)
        assert all(torch.equal(product(x), expected) for _ in range(100))

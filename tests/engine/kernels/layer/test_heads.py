"""Products of heads against plain operations of torch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.kernels.gemm.int8.dots import instruction_sets
from engine.kernels.gemm.int8.matmul import Int8Matmul
from engine.kernels.gemm.matmul import Matmul
from engine.kernels.layer.program import LayerProgram
from engine.kernels.quant.quantise import quantised
from engine.kernels.quant.stored import StoredMatrix
from tests.engine.kernels.layer.test_program import ROWS, close, multiplied, program_of, types

HEADS, INPUTS, OUTPUTS, BESIDE = 3, 64, 32, 16


def ran(program: LayerProgram, source: Tensor, rows: Tensor) -> Tensor:
    """What the program makes of some rows, [rows, heads, BESIDE + outputs]."""
    source[: len(rows)] = rows
    program.begin(len(rows), 0, 0, [torch.zeros(1)])
    program.run()
    return program.buffers["goal"][: len(rows)].unflatten(1, (HEADS, -1)).clone()


def prepared(matrices: list[Matmul], dtype: torch.dtype) -> tuple[LayerProgram, Tensor]:
    """A program that multiplies a part of each head into a part of a goal; its source."""
    program = program_of(dtype)
    source = program.buffer("source", HEADS * (INPUTS + BESIDE))
    goal = program.buffer("goal", HEADS * (BESIDE + OUTPUTS)).unflatten(1, (HEADS, -1))
    program.by_heads(matrices, source.unflatten(1, (HEADS, -1))[..., :INPUTS], goal[..., BESIDE:])
    program.norm(None)
    return program, source


@multiplied
@types
@pytest.mark.parametrize("threads", [1, 2])
def test_each_head_of_a_row_is_multiplied_by_its_own_matrix_and_nothing_beside_it_changes(
    dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weights = torch.randn(HEADS, OUTPUTS, INPUTS).to(dtype) / 8
    program, source = prepared([Matmul(weight) for weight in weights], dtype)
    rows = torch.randn(ROWS, HEADS * (INPUTS + BESIDE)).to(dtype)
    found = ran(program, source, rows)
    expected = torch.einsum("rhi,hoi->rho", rows.float().unflatten(1, (HEADS, -1))[..., :INPUTS], weights.float())
    assert close(found[..., BESIDE:], expected, dtype) and not found[..., :BESIDE].any()


@pytest.mark.skipif(not instruction_sets(), reason="this processor has no integer products that we know")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch_where_threads_share_rounded_rows(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    stored = [StoredMatrix("Q8_0", quantised(torch.randn(OUTPUTS, INPUTS).numpy(), "Q8_0")) for _ in range(HEADS)]
    program, source = prepared([Int8Matmul([one]) for one in stored], torch.bfloat16)
    rows = torch.randn(ROWS, HEADS * (INPUTS + BESIDE)).to(torch.bfloat16)
    together = ran(program, source, rows)
    for first, end in pairwise((0, 1, 2, 5, ROWS)):
        assert torch.equal(ran(program, source, rows[first:end]), together[first:end])

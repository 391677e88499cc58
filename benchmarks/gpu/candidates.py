"""Kernels in Triton that may replace what runs today: products, and kernels that begin early."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CODES = 32
"""Weights of four bits that share a scale."""
_INTERPRETED = bool(triton.knobs.runtime.interpret)  # the interpreter multiplies the bits of bfloat16 as integers


@triton.jit
def _product(
    x,  # [rows, inputs]
    weight,  # [outputs, inputs], or [outputs, inputs / 2] codes of four bits, the even inputs' low
    scales,  # [outputs, inputs / 32], of codes
    out,  # [rows, outputs], or [rows, outputs / 2] if gated: gates, then ups
    rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    CODED: tl.constexpr,
    WIDENED: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    put = tl.arange(0, INPUTS)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, inputs, INPUTS):
        a = tl.load(x + row[:, None] * inputs + (at + put)[None, :], mask=(row < rows)[:, None], other=0.0)
        place = output[:, None].to(tl.int64) * inputs + (at + put)[None, :]
        if CODED:
            codes = tl.load(weight + place // 2).to(tl.int32)
            codes = tl.where(((at + put) % 2 == 0)[None, :], codes & 15, codes >> 4) - 8
            b = (codes.to(tl.float32) * tl.load(scales + place // 32).to(tl.float32)).to(x.dtype.element_ty)
        else:
            b = tl.load(weight + place)
        if WIDENED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    place = out + row[:, None] * outputs + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows)[:, None])


def product(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return [rows, outputs]. x: [rows, inputs]; weight: [outputs, inputs], or codes with `scales`; outputs are a
    multiple of 32, inputs of 64. Inputs are added up in blocks of one size, whatever the number of rows.
    """
    (rows, inputs), outputs = x.shape, len(weight)
    of_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    of_outputs = 32 if outputs <= 4096 and rows <= 64 else 128
    of_outputs = of_outputs if outputs % of_outputs == 0 else 32
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _product[(outputs // of_outputs, triton.cdiv(rows, of_rows))](
        x, weight, x if scales is None else scales, out, rows, outputs, inputs, ROWS=of_rows, OUTPUTS=of_outputs,
        INPUTS=64, CODED=scales is not None, WIDENED=_INTERPRETED, num_warps=4 if of_rows < 128 else 8, num_stages=4,
    )  # fmt: skip
    return out


def coded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of four bits, their scales, and the weight that they stand for. weight: [outputs, inputs]."""
    groups = weight.float().unflatten(1, (-1, CODES))
    scales = (groups.abs().amax(-1) / 7).to(weight.dtype)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).nan_to_num()
    meant = (codes * scales.float()[..., None]).to(weight.dtype).flatten(1)
    numbers = (codes.flatten(1).to(torch.int32) + 8).to(torch.uint8)
    return numbers[:, ::2] | numbers[:, 1::2] << 4, scales, meant


@triton.jit
def _plus_one(x, EARLY: tl.constexpr, SIZE: tl.constexpr):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    place = x + tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(place, tl.load(place) + 1)


def plus_one(x: Tensor, early: bool) -> None:
    """Add one to each number. early: the next kernel is set up while this one runs (programmatic dependent launch)."""
    options = {"launch_pdl": True} if early else {}
    _plus_one[(len(x) // 256,)](x, EARLY=early, SIZE=256, num_warps=1, **options)

"""A product in Triton that adds up the inputs in blocks of one size, whatever the number of rows. It is a candidate for
rows whose bits depend on nothing else, and step `products` compares it with cuBLAS.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_INTERPRETED = bool(triton.knobs.runtime.interpret)  # the interpreter multiplies the bits of bfloat16 as integers


@triton.jit
def _product(
    x,  # [rows, inputs]
    weight,  # [outputs, inputs]
    out,  # [rows, outputs]
    rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDENED: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    put = tl.arange(0, INPUTS)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, inputs, INPUTS):
        a = tl.load(x + row[:, None] * inputs + (at + put)[None, :], mask=(row < rows)[:, None], other=0.0)
        b = tl.load(weight + output[:, None].to(tl.int64) * inputs + (at + put)[None, :])
        if WIDENED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    place = out + row[:, None] * outputs + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows)[:, None])


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply. x: [rows, inputs]; weight: [outputs, inputs], outputs a multiple of 32, inputs of 64.

    Returns [rows, outputs].
    """
    (rows, inputs), outputs = x.shape, len(weight)
    of_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128
    of_outputs = 32 if outputs <= 4096 and rows <= 64 else 128
    of_outputs = of_outputs if outputs % of_outputs == 0 else 32
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _product[(outputs // of_outputs, triton.cdiv(rows, of_rows))](
        x, weight, out, rows, outputs, inputs, ROWS=of_rows, OUTPUTS=of_outputs, INPUTS=64, WIDENED=_INTERPRETED,
        num_warps=4 if of_rows < 128 else 8, num_stages=4,
    )  # fmt: skip
    return out

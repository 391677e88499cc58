"""Products by oneDNN, where ours do not run: weights laid out once, and results that do not depend on the other rows.

Verifying a tree multiplies every weight matrix by some tens of rows, a draft step by about ten. A stock product then
takes as long to convert the matrix to its compute layout as to compute; oneDNN can keep it in that layout. Measured for
all matrices of a model of 17 M parameters on one core with AVX512-BF16, milliseconds:

    rows                  1      8     16     32     60
    bfloat16  stock     4.4    5.6    7.1    9.6   14.3
              packed    2.1    3.0    4.1    6.8   11.3
    float32   stock     6.5   10.7   13.6   19.1   29.7
              packed    5.3    5.8    7.6   12.6   21.6

Where `engine.kernels.gemm.matmul` runs, it is as fast or faster, and takes any row count.

oneDNN chooses a kernel by the row count, and kernels sum in different orders. Which row counts give the same bits is
measured here, on this machine, for each shape: with AVX512-BF16 all from 2 rows on, with AMX from 1 to 32.
`exact_rows` finds that range, and `engine.kernels.gemm.product` stays inside it: fewer rows are padded, more are split
into chunks.

oneDNN also creates and caches what it needs for each shape and row count: about 1 ms and 0.5 MB, up to 1,024 of them.
Trees have any number of rows, so rows are padded to one of a few counts (`filled`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_ANCHOR = 16  # rows of the product that the others are compared with
MOST_TRIED = 512
_ANY_TRIED = (*range(1, 41), 48, 63, 64, 65, 96, 128, 200, 256, 300, 384, MOST_TRIED)
_SHIFT = 5  # rows are tried at places shifted by so much


class RowRange(NamedTuple):
    """With `least` to `most` rows, a product gives each row the same bits."""

    least: int
    most: int


ANY_ROWS = RowRange(1, 1 << 40)


def filled(rows: int) -> int:
    """Return the padded row count of a packed product of `rows` rows: any up to 16, then 8 between two
    powers of two.
    """
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def pack(weight: Tensor) -> Tensor | None:
    """Return the matrix [out, in] in oneDNN's layout, for `packed_product`; None if it has none."""
    if weight.device.type != "cpu" or not _can_pack(weight.dtype):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., in] times the packed matrix, plus the bias: [..., out]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def exact_rows(weight: Tensor, biased: bool) -> RowRange | None:
    """Return the row counts for which a product of this shape and type gives a row the same bits, with one thread, with
    all of torch's and with half of them; None if there are none.
    """
    found: RowRange | None = _measure(weight.shape[0], weight.shape[1], weight.dtype, biased, torch.get_num_threads())
    return found


@cache
@torch.inference_mode()
def _measure(outputs: int, inputs: int, dtype: torch.dtype, biased: bool, threads: int) -> RowRange | None:
    x, weight = cancelling(outputs, inputs, dtype)
    packed, bias = pack(weight), weight.new_zeros(outputs) if biased else None
    assert packed is not None
    tried = sorted({filled(rows) for rows in range(1, MOST_TRIED + 1)})
    return equal_rows(lambda rows: packed_product(rows, packed, bias), x, threads, tried)


def equal_rows(
    multiply: Callable[[Tensor], Tensor], x: Tensor, threads: int, tried: Sequence[int] = _ANY_TRIED
) -> RowRange | None:
    """Return the row counts, around that of x, for which each row's product has the same bits. tried: ascending, with
    all up to that of x.
    """
    expected = multiply(x)
    equal = dict.fromkeys(tried, True)
    try:
        for count in {1, threads // 2, threads - threads // 2, threads} - {0}:  # with and without a drafter running
            torch.set_num_threads(count)
            for rows in tried:
                order = (torch.arange(rows) + _SHIFT) % _ANCHOR
                equal[rows] = equal[rows] and torch.equal(multiply(x[order]), expected[order])
    finally:
        torch.set_num_threads(threads)
    below = next((rows for rows in range(_ANCHOR, 0, -1) if not equal[rows]), 0)
    if below == _ANCHOR:
        return None
    above = next((i for i, rows in enumerate(tried) if rows > _ANCHOR and not equal[rows]), len(tried))
    return RowRange(below + 1, tried[above - 1])


def cancelling(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [anchor, inputs] and a weight whose products are 0: the result is only rounding, which shows every
    change of a kernel's summation order.
    """
    generator = torch.Generator().manual_seed(0)
    half, block = inputs // 2, min(outputs, 512)
    order = torch.randperm(2 * half, generator=generator)

    def twice(rows: int, sign: int) -> Tensor:
        made = torch.randn(rows, half, generator=generator, dtype=torch.float32).to(dtype)
        both = torch.cat([made, sign * made], dim=1)[:, order]
        return torch.cat([both, both.new_zeros(rows, inputs - 2 * half)], dim=1)

    x, weight = twice(_ANCHOR, 1), twice(block, -1)
    return x, weight.repeat(-(-outputs // block), 1)[:outputs].contiguous()


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Return whether this build of torch and this processor have the product, and it agrees with the plain one."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    weight, x = torch.randn(24, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype)
    try:
        found = packed_product(x, torch.ops.mkldnn._reorder_linear_weight(weight), None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool(torch.allclose(found.float(), F.linear(x.float(), weight.float()), atol=1e-5, rtol=2e-2))

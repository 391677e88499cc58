"""Linear layers on a CPU: weights laid out once, and results that do not depend on the other rows.

Verifying a tree multiplies every weight matrix by some tens of rows, a draft step by about ten. A stock product then
takes as long to convert the matrix to its compute layout as to compute; oneDNN can keep it in that layout. Measured for
all matrices of a model of 17 M parameters on one core with AVX512-BF16, milliseconds:

    rows                  1      8     16     32     60
    bfloat16  stock     4.4    5.6    7.1    9.6   14.3
              packed    2.1    3.0    4.1    6.8   11.3
    float32   stock     6.5   10.7   13.6   19.1   29.7
              packed    5.3    5.8    7.6   12.6   21.6

Where `engine.kernels.gemm.matmul` runs, it is as fast or faster, and takes any row count; this is for other processors.

oneDNN chooses a kernel by the row count, and kernels sum in different orders. Which row counts give the same bits is
measured here, on this machine, for each shape: with AVX512-BF16 all from 2 rows on, with AMX from 1 to 32.
`exact_rows` finds that range, and `Product` stays inside it: fewer rows are padded, more are split into chunks.

oneDNN also creates and caches what it needs for each shape and row count: about 1 ms and 0.5 MB, up to 1,024 of them.
Trees have any number of rows, so rows are padded to one of a few counts (`filled`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import Activations
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.kernels.gemm.int8.layout import has_integer_codes
from engine.kernels.gemm.int8.matmul import Int8Matmul
from engine.kernels.gemm.matmul import Matmul, shape_of, units
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.simd import LANES

_ANCHOR = 16  # rows of the product that the others are compared with
_MOST_TRIED = 512
_ANY_TRIED = (*range(1, 41), 48, 63, 64, 65, 96, 128, 200, 256, 300, 384, _MOST_TRIED)
_SHIFT = 5  # rows are tried at other places than in the anchor


class RowRange(NamedTuple):
    """With `least` to `most` rows, a product gives each row the same bits."""

    least: int
    most: int


ANY_ROWS = RowRange(1, 1 << 40)


def filled(rows: int) -> int:
    """The padded row count of a packed product of `rows` rows: any up to 16, then 8 between two powers of two."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def pack(weight: Tensor) -> Tensor | None:
    """The matrix [out, in] in oneDNN's layout, for `product`; None if it has none."""
    if weight.device.type != "cpu" or not _can_pack(weight.dtype):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times the packed matrix, plus the bias: [..., out]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


class Product:
    """x [rows, in] times a matrix [out, in], plus the bias; a row's bits are independent of others if `rows` is known.

    weight: the matrix, or the parts of a file that hold its outputs one after the other, rounded to bfloat16. gated: it
    is a gate and then an up projection. If `gated` stays true, the result is silu(gate) * up. activations: int8 rounds
    rows to 8 bits if all parts are of codes. dtype: of x and of the result, for parts.
    """

    def __init__(
        self,
        weight: Tensor | Sequence[StoredMatrix],
        bias: Tensor | None = None,
        gated: bool = False,
        activations: Activations = "bfloat16",
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.bias = bias
        self.matmul: Matmul | None = None
        if not isinstance(weight, Tensor):
            if activations == "int8":
                self.matmul = int8_matmul(weight, bias, gated, dtype)
            if self.matmul is None and dtype != torch.bfloat16:
                weight = torch.cat([part.values() for part in weight]).to(dtype)
        self.packed: Tensor | None = None
        self._weight: Tensor | None = None
        self.rows: RowRange | None = ANY_ROWS
        if isinstance(weight, Tensor):
            self.outputs, self.inputs = weight.shape
            self._itemsize, own, one_layout = weight.itemsize, can_multiply(weight), True
        else:
            self.outputs, self.inputs = shape_of(weight)
            self._itemsize, own = dtype.itemsize, multiplies(torch.bfloat16)
            one_layout = len({part.layout for part in weight}) == 1
        self.gated = gated and self.outputs % (2 * LANES) == 0 and (own or self.matmul is not None) and one_layout
        if self.matmul is None and own:
            self.matmul = Matmul(weight, bias, self.gated)
        if self.matmul is None:
            whole = weight if isinstance(weight, Tensor) else torch.cat([part.values() for part in weight])
            self.packed = pack(whole)
            self._weight = whole if self.packed is None else None
            self.rows = None if self.packed is None else exact_rows(whole, bias is not None)

    @property
    def activations(self) -> Activations:
        return "int8" if isinstance(self.matmul, Int8Matmul) else "bfloat16"

    @property
    def stock(self) -> bool:
        """Whether this is just what `nn.Linear` does."""
        return self.matmul is None and self.packed is None

    @property
    def bytes(self) -> int:
        """Bytes of memory that the matrix takes."""
        return self.outputs * self.inputs * self._itemsize if self.matmul is None else self.matmul.bytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.matmul is not None:
            return self.matmul(x)
        if self.packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self.bias)
        count, (least, most) = len(x), self.rows or ANY_ROWS
        if count > most:
            return torch.cat([self(chunk) for chunk in x.split(most)])
        if missing := max(least, filled(count)) - count:
            x = torch.cat([x, x.new_zeros(missing, x.shape[1])])
        return product(x, self.packed, self.bias)[:count]


def int8_matmul(
    parts: Sequence[StoredMatrix], bias: Tensor | None, gated: bool, dtype: torch.dtype
) -> Int8Matmul | None:
    """The product with rows of 8 bits; None where there is none. gated: if both halves are whole panels of one type."""
    panels = all(part.shape[0] % LANES == 0 for part in parts[:-1])
    if not (instruction_sets() and panels and all(has_integer_codes(part.layout) for part in parts)):
        return None
    halves = len({part.layout for part in parts}) == 1 and shape_of(parts)[0] % (2 * LANES) == 0
    return Int8Matmul(parts, bias, gated and halves, dtype)


class PackedLinear(nn.Module):
    """Does what the `nn.Linear` that it replaces does."""

    def __init__(self, linear: nn.Linear, product: Product):
        super().__init__()
        self.bias, self.product = linear.bias, product
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]."""
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def pack_linears(model: Any) -> bool:
    """Replace every `nn.Linear` of a loaded model by a PackedLinear. Returns whether all their rows are exact."""
    exact = True
    for name, linear in [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]:
        packed = PackedLinear(linear, Product(linear.weight, linear.bias))
        exact = exact and packed.product.rows is not None
        if packed.product.stock:
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, packed)
    return exact


def exact_rows(weight: Tensor, biased: bool) -> RowRange | None:
    """The row counts for which a product of this shape and type gives a row the same bits, with one thread, with all of
    torch's and with half of them; None if there are none.
    """
    found: RowRange | None = _measure(weight.shape[0], weight.shape[1], weight.dtype, biased, torch.get_num_threads())
    return found


@cache
@torch.inference_mode()
def _measure(outputs: int, inputs: int, dtype: torch.dtype, biased: bool, threads: int) -> RowRange | None:
    x, weight = _cancelling(outputs, inputs, dtype)
    packed, bias = pack(weight), weight.new_zeros(outputs) if biased else None
    assert packed is not None
    tried = sorted({filled(rows) for rows in range(1, _MOST_TRIED + 1)})
    return _equal_rows(lambda rows: product(rows, packed, bias), x, threads, tried)


def _equal_rows(
    multiply: Callable[[Tensor], Tensor], x: Tensor, threads: int, tried: Sequence[int] = _ANY_TRIED
) -> RowRange | None:
    """The row counts, around that of x, for which each row's product has the same bits. tried: ascending, with all up
    to that of x.
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


def _cancelling(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [anchor, inputs] and a weight whose products are 0: the result is only rounding, which shows every change of a
    kernel's summation order.
    """
    generator = torch.Generator().manual_seed(0)
    half, block = inputs // 2, min(outputs, 512)
    order = torch.randperm(2 * half, generator=generator)

    def twice(rows: int, sign: int) -> Tensor:
        made = torch.randn(rows, half, generator=generator).to(dtype)
        both = torch.cat([made, sign * made], dim=1)[:, order]
        return torch.cat([both, both.new_zeros(rows, inputs - 2 * half)], dim=1)

    x, weight = twice(_ANCHOR, 1), twice(block, -1)
    return x, weight.repeat(-(-outputs // block), 1)[:outputs].contiguous()


def can_multiply(weight: Tensor) -> bool:
    """Whether `Matmul` can multiply this matrix. On one thread, in milliseconds for all matrices of a model of 135 M
    parameters; with AVX2 for those of its layers, on a slower processor; float32 with AVX512 was not measured:

        rows                              1      8     16     32     64    512
        AMX                  oneDNN    29.4   29.1   30.3   35.0   39.1   35 for each 32 (as many as are exact)
                             Matmul    23.1   24.4   25.0   29.2   38.4    219
        AVX512-BF16          oneDNN    29.7   43.3   62.7  105.7         1,391
                             Matmul    24.4   37.5   59.6  102.7         1,420
        AVX2, bfloat16       Matmul    22.4   33.0   58.9  114.8  214.1  1,654
        AVX2, float32        oneDNN    32.8   65.8   92.1  170.1  288.7  1,880
                             Matmul    31.6   53.8   83.3  149.4  295.4  2,507
    """
    return bool(weight.device.type == "cpu" and multiplies(weight.dtype))


@cache
@torch.inference_mode()
def multiplies(dtype: torch.dtype) -> bool:
    """Whether `Matmul` works on this processor: it agrees with the plain product, and gives the same bits for any row
    count.
    """
    if dtype not in (torch.bfloat16, torch.float32) or not units(dtype):
        return False
    x, weight = _cancelling(272, 288, dtype)
    if _equal_rows(Matmul(weight), x, torch.get_num_threads()) != RowRange(1, _MOST_TRIED):
        return False
    weight = torch.randn_like(weight)
    return bool(torch.allclose(Matmul(weight)(x).float(), F.linear(x.float(), weight.float()), atol=0.5, rtol=2e-2))


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor have the product, and it agrees with the plain one."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    weight, x = torch.randn(24, 16).to(dtype), torch.randn(8, 16).to(dtype)
    try:
        found = product(x, torch.ops.mkldnn._reorder_linear_weight(weight), None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool(torch.allclose(found.float(), F.linear(x.float(), weight.float()), atol=1e-5, rtol=2e-2))

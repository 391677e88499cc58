"""A product of rows with a matrix, by the fastest way that this processor and the matrix allow: every linear layer of a
target on a CPU is one. A row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import Activations
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.kernels.gemm.int8.matmul import Int8Matmul
from engine.kernels.gemm.matmul import Matmul, gate_and_up, shape_of, units
from engine.kernels.gemm.onednn import (
    ANY_ROWS,
    MOST_TRIED,
    RowRange,
    cancelling,
    equal_rows,
    exact_rows,
    filled,
    pack,
    packed_product,
)
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.simd import LANES


class Product:
    """x [rows, in] times a matrix [out, in], plus the bias; a row's bits are independent of others if `rows` is known.

    weight: the matrix, or the parts of a file that hold its outputs one after the other, rounded to bfloat16. gated: it
    is a gate and then an up projection. If `gated` stays true, the result is silu(gate) * up. activations: int8 rounds
    rows to 8 bits if all parts are of codes. rounds: what calls it rounds all rows first, each by its largest amount.
    """

    rounds = False

    def __init__(
        self,
        weight: Tensor | Sequence[StoredMatrix],
        bias: Tensor | None = None,
        gated: bool = False,
        activations: Activations = "bfloat16",
    ):
        self.bias = bias
        self.matmul: Matmul | None = None
        if not isinstance(weight, Tensor) and activations == "int8":
            self.matmul = int8_matmul(weight, bias, gated)
        self.packed: Tensor | None = None
        self._weight: Tensor | None = None
        self.rows: RowRange | None = ANY_ROWS
        if isinstance(weight, Tensor):
            self.outputs, self.inputs = weight.shape
            self._itemsize, own, halves = weight.itemsize, can_multiply(weight), self.outputs % (2 * LANES) == 0
        else:
            self.outputs, self.inputs = shape_of(weight)
            self._itemsize, own, halves = torch.bfloat16.itemsize, multiplies(torch.bfloat16), gate_and_up(weight)
        self.gated = gated and halves and (own or self.matmul is not None)
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
        return packed_product(x, self.packed, self.bias)[:count]


def int8_matmul(
    parts: Sequence[StoredMatrix], bias: Tensor | None, gated: bool, dtype: torch.dtype = torch.bfloat16
) -> Int8Matmul | None:
    """Return the product with rows of 8 bits; None where there is none. gated: if each half is of whole panels and of
    one type.
    """
    panels = all(part.shape[0] % LANES == 0 for part in parts[:-1])
    if not (instruction_sets() and panels and all(part.layout.coded for part in parts)):
        return None
    return Int8Matmul(parts, bias, gated and gate_and_up(parts), dtype)


class PackedLinear(nn.Module):
    """Does what the `nn.Linear` that it replaces does."""

    def __init__(self, linear: nn.Linear, product: Product):
        super().__init__()
        self.bias, self.product = linear.bias, product
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x: [..., in_features]."""
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def pack_linears(model: Any) -> bool:
    """Replace every `nn.Linear` of a loaded model by a PackedLinear, and return whether all their rows are exact."""
    exact = True
    for name, linear in [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]:
        packed = PackedLinear(linear, Product(linear.weight, linear.bias))
        exact = exact and packed.product.rows is not None
        if packed.product.stock:
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, packed)
    return exact


def can_multiply(weight: Tensor) -> bool:
    """Return whether `Matmul` can multiply this matrix. On one thread, in milliseconds for all matrices of a model of
    135 M parameters; with AVX2 for those of its layers, on a slower processor; float32 with AVX512 was not measured:

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
    """Return whether `Matmul` works on this processor: it agrees with the plain product, and gives the same bits for
    any row count.
    """
    if dtype not in (torch.bfloat16, torch.float32) or not units(dtype):
        return False
    x, weight = cancelling(272, 288, dtype)
    if equal_rows(Matmul(weight), x, torch.get_num_threads()) != RowRange(1, MOST_TRIED):
        return False
    weight = torch.randn_like(weight)
    return bool(torch.allclose(Matmul(weight)(x).float(), F.linear(x.float(), weight.float()), atol=0.5, rtol=2e-2))

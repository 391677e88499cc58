"""Matrix products of a few rows on a CPU, in float32, without repacking the weights every time.

Verifying a tree multiplies every weight matrix by some tens of rows. MKL then spends as long on bringing the matrix
into its own layout as on multiplying; laid out once, at loading, 16 rows cost little more than one. Measured for all
matrices of the demo target (17 M parameters) on two AVX512 cores, milliseconds, one | two threads:

    rows     1          8            16            32            64
    stock    7.8 | 4.4  15.8 |  9.9  14.8 | 17.4   19.2 | 20.4   27.6 | 14.9
    packed              8.4 |  4.7   10.1 |  5.8   13.9 |  7.6   20.9 | 15.2

MKL's layout belongs to a number of rows, so there is one copy of the weights for each of ROWS, made when it is first
needed; fewer rows are filled up with zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = (8, 16, 32, 64)
_MOST_BYTES = 1 << 30  # of weights; beyond it the copies would take more memory than the time is worth


class PackedLinear(nn.Module):
    """Does what the `nn.Linear` does whose place it takes."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packs: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] float32."""
        rows = x.numel() // self.in_features
        if rows == 1 or rows > ROWS[-1]:
            return F.linear(x, self.weight, self.bias)
        size = next(size for size in ROWS if size >= rows)
        pack = self._packs.get(size)
        if pack is None:
            pack = self._packs[size] = torch.ops.mkl._mkl_reorder_linear_weight(self.weight.detach(), size)
        flat = x.reshape(rows, self.in_features)
        if rows < size:
            flat = F.pad(flat, (0, 0, 0, size - rows))
        out: Tensor = torch.ops.mkl._mkl_linear(flat, pack, self.weight, self.bias, size)
        return out[:rows].view(*x.shape[:-1], self.out_features)


def pack_linears(model: Any) -> None:
    """Put a PackedLinear in the place of every `nn.Linear` of a loaded model, where that is faster."""
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    size = sum(linear.weight.nbytes for _, linear in linears)
    if model.device.type != "cpu" or model.dtype != torch.float32 or size > _MOST_BYTES or not _has_packing():
        return
    for name, linear in linears:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, PackedLinear(linear))


def _has_packing() -> bool:
    """Whether this build of torch has MKL's packed product and it gives what the plain one does."""
    weight, x = torch.randn(24, 16), torch.randn(8, 16)
    try:
        pack = torch.ops.mkl._mkl_reorder_linear_weight(weight, 8)
        product = torch.ops.mkl._mkl_linear(x, pack, weight, None, 8)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool(torch.allclose(product, F.linear(x, weight), atol=1e-5))

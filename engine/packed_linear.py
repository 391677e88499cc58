"""Matrix products of a few rows on a CPU, without rearranging the weights every time.

Verifying a tree multiplies every weight matrix by some tens of rows, a draft step by about ten. A stock product then
spends as long on bringing the matrix into the layout it computes in as on computing; oneDNN can keep it in that
layout. Measured for all matrices of the demo target (17 M parameters) on one core with AVX512-BF16, milliseconds:

    rows                  1      8     16     32     60
    bfloat16  stock     4.4    5.6    7.1    9.6   14.3
              packed    2.1    3.0    4.1    6.8   11.3
    float32   stock     6.5   10.7   13.6   19.1   29.7
              packed    5.3    5.8    7.6   12.6   21.6
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MOST_BYTES = 1 << 30  # of weights; beyond it the second copy would take more memory than the time is worth


def pack(weight: Tensor) -> Tensor | None:
    """The matrix [out, in] in oneDNN's layout, for `product`; None where there is none for it."""
    if weight.device.type != "cpu" or not _can_pack(weight.dtype):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times the packed matrix, plus the bias: [..., out]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


class PackedLinear(nn.Module):
    """Does what the `nn.Linear` does whose place it takes."""

    def __init__(self, linear: nn.Linear, packed: Tensor):
        super().__init__()
        self.weight, self.bias, self._packed = linear.weight, linear.bias, packed
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]."""
        return product(x, self._packed, self.bias)


def pack_linears(model: Any) -> None:
    """Put a PackedLinear in the place of every `nn.Linear` of a loaded model, where that is faster."""
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    if sum(linear.weight.nbytes for _, linear in linears) > _MOST_BYTES:
        return
    for name, linear in linears:
        if (packed := pack(linear.weight)) is not None:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, PackedLinear(linear, packed))


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor have the product, and it gives what the plain one does."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    weight, x = torch.randn(24, 16).to(dtype), torch.randn(8, 16).to(dtype)
    try:
        found = product(x, torch.ops.mkldnn._reorder_linear_weight(weight), None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool(torch.allclose(found.float(), F.linear(x.float(), weight.float()), atol=1e-5, rtol=2e-2))

"""Products of bfloat16 in the stock forward of a file's layers, where the processor has no instructions for them.

torch multiplies bfloat16 there six times as slowly as float32. Here a part of a matrix at a time becomes float32,
which changes no number; sums are float32 and are rounded once, as in torch's own products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.model.loading import has_native_bfloat16

_AT_ONCE = 1 << 20  # numbers of a matrix that are float32 at a time
_FEW = 8  # rows, which torch multiplies as fast itself


def stock_products() -> AbstractContextManager[object]:
    """Return the context in which stock code multiplies fast on this CPU."""
    return nullcontext() if has_native_bfloat16() else Float32Products()


class Float32Products(TorchFunctionMode):
    """Multiplies rows and matrices of bfloat16 through float32: linear layers, and experts that are grouped."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS and len(args) > 1 and args[0].dtype == args[1].dtype == torch.bfloat16:
            return _PRODUCTS[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `F.linear` does. rows: [..., inputs]. matrix: [outputs, inputs]."""
    *counts, inputs = rows.shape
    if prod(counts) <= _FEW:
        return F.linear(rows, matrix, bias)
    columns = rows.float().reshape(-1, inputs).T
    sums = torch.cat([part.float() @ columns for part in matrix.split(max(1, _AT_ONCE // inputs))]).T.contiguous()
    return (sums if bias is None else sums + bias).to(torch.bfloat16).unflatten(0, counts)


def _grouped(rows: Tensor, matrices: Tensor, *, offs: Tensor) -> Tensor:
    """Return what `F.grouped_mm` does. rows: [rows, inputs]. matrices: [groups, inputs, outputs]. offs: [groups], the
    ends of the groups' rows.
    """
    ends = offs.tolist()
    groups = zip(matrices, [0, *ends], ends, strict=False)
    return torch.cat([_linear(rows[start:end], matrix.T) for matrix, start, end in groups if end > start])


_PRODUCTS: dict[Callable[..., Any], Callable[..., Tensor]] = {F.linear: _linear}
if hasattr(F, "grouped_mm"):  # torch 2.10
    _PRODUCTS[F.grouped_mm] = _grouped

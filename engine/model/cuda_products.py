"""Products on CUDA that give a row the same bits in forwards of several sizes, as far as a check at load proves it.

A GPU library picks a kernel, and with it the order of summation, by the number of rows. Kernels that do not split a sum
over blocks (split-K) were found to add in one order: cuBLASLt without split-K gave a row the same bits for 1 to 1,024
rows on an H100. Other devices may differ, so every shape is compared at load.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

SLICE = 64
"""Rows of a forward where no other number gives the same bits: a GPU does 64 in about the time of one, which is the
time to read the weights.
"""
SIZES = (16, SLICE, 256, 512, 1024)
"""Rows of a forward: the least that holds all rows; more run in slices of the largest."""

_PROBES = 16  # rows that are compared, in every place
_LIBRARIES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}  # KiB: too little for parts of sums


_HOLDERS: WeakSet[Any] = WeakSet()
"""Forwards that were proved with the products of this process as they are now."""


def hold_split_sums(forward: Any) -> None:
    """Keep the products of this process as they are for as long as `forward` is there: it was proved with them."""
    _HOLDERS.add(forward)


def forbid_split_sums() -> bool:
    """Have this process's products on CUDA use cuBLASLt without split-K, and return whether they do then. Nothing is
    changed if torch cannot, or while there is a forward that was proved with others.

    This holds for the whole process, since torch has no narrower setting: draft models in its threads are multiplied so
    too. The sizes of the workspaces are read at a process's first product, and are left alone where the user set them.
    """
    matmul: Any = torch.backends.cuda.matmul
    if _HOLDERS:
        return bool(matmul.allow_bf16_reduced_precision_reduction is not True)
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
    except (RuntimeError, TypeError, AttributeError):  # no cuBLASLt, or a version that cannot forbid split-K
        allow_split_sums()
        return False
    for name, value in _LIBRARIES.items():
        os.environ.setdefault(name, value)
    return True


def allow_split_sums() -> bool:
    """Undo `forbid_split_sums`, except for the sizes of the workspaces, and return whether that was done: not while a
    forward was proved with products as they are.
    """
    if _HOLDERS:
        return False
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.preferred_blas_library("default")
    return True


def exact_sizes(linears: Sequence[nn.Linear], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the forward sizes (always including SLICE) in which every product gives a row the same bits as in SLICE
    rows, at any place; () if one does not in SLICE rows themselves.
    """
    one_of_each = {(*module.weight.shape, module.weight.dtype, module.bias is None): module for module in linears}
    found = tuple(sizes)
    for linear in one_of_each.values():
        found = _exact_sizes(linear, found)
    return found if SLICE in found else ()


def _exact_sizes(linear: nn.Linear, sizes: Sequence[int]) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(min(_PROBES, *sizes, SLICE), linear.in_features, generator=generator).to(linear.weight)
    expected = linear(torch.cat([x, x.new_zeros(SLICE - len(x), linear.in_features)])[None])[0, : len(x)]
    found = []
    for rows in sizes:
        try:
            if all(_repeats(linear(given[None])[0], expected, shift) for shift, given in _placed(x, rows)):
                found.append(rows)
        except torch.OutOfMemoryError:  # a forward of as many rows, or more, would not find the memory either
            break
    return tuple(found)


def _placed(x: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield [rows, inputs]: the probes over and over, from each of them on, so that each of them stands
    in every place.
    """
    for shift in range(len(x)):
        yield shift, x[(torch.arange(rows, device=x.device) + shift) % len(x)]


def _repeats(out: Tensor, expected: Tensor, shift: int) -> bool:
    """Return whether `out` is the expected rows over and over, from the row `shift` on."""
    expected = expected.roll(-shift, 0)
    return all(torch.equal(part, expected[: len(part)]) for part in out.split(len(expected)))

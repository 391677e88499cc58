"""Products with rows of 8 bits in numpy, in the kernels' order of operations: whole numbers, then float32."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.kernels.quant.stored import StoredMatrix
from tests.engine.kernels.quant.random_blocks import read_apart

Floats = NDArray[np.float32]
GROUP = 32


class RoundedRows(NamedTuple):
    """codes: [rows, groups, 32] int64. scales: [rows, groups] float32."""

    codes: NDArray[np.int64]
    scales: Floats


def rounded(x: Floats) -> RoundedRows:
    """x: [rows, inputs]."""
    groups = x.reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(axis=2)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest > np.float32(1e-30), np.float32(127) / largest, np.float32(0))
    codes = np.rint(groups * inverse[..., None]).astype(np.int64)
    return RoundedRows(codes, np.where(np.isfinite(largest), largest / np.float32(127), np.float32(np.nan)))


def product(x: Floats, matrix: StoredMatrix) -> Floats:
    """[rows, outputs] float32."""
    rows, of = rounded(x), read_apart(matrix)
    outputs, inputs = matrix.shape
    groups, halves = inputs // GROUP, of.scales.shape[2]
    codes = of.codes.reshape(outputs, groups, halves, -1)
    given = rows.codes.reshape(len(x), groups, halves, -1)
    sums = np.zeros((len(x), outputs), np.float32)
    for group in range(groups):
        for half in range(halves):
            whole = np.einsum("oi,ri->ro", codes[:, group, half], given[:, group, half])
            scale = of.scales[:, group, half][None] * rows.scales[:, group][:, None]
            sums = fused(whole.astype(np.float32), scale, sums)
        for half in range(0 if of.offsets is None else halves):
            total = rows.scales[:, group] * given[:, group, half].sum(axis=1).astype(np.float32)
            sums = fused(np.broadcast_to(of.offsets[:, group, half], sums.shape), total[:, None], sums)
    return sums


def fused(a: NDArray[np.float32], b: NDArray[np.float32], c: Floats) -> Floats:
    """a * b + c rounded once: the product is exact in float64, and the sum is rounded to odd there."""
    exact, added = a.astype(np.float64) * b, c.astype(np.float64)
    total = exact + added
    back = total - exact
    missing = (exact - (total - back)) + (added - back)
    even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
    odd = np.where((missing != 0) & even, np.nextafter(total, np.where(missing > 0, np.inf, -np.inf)), total)
    return odd.astype(np.float32)

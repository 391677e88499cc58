"""Products with rows of 8 bits in numpy, in the kernels' order of operations: whole numbers, then float32."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.gemm.int8.layout import CodedMatrix, Int8Layout

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
    return RoundedRows(codes, largest / np.float32(127))


def product(x: Floats, matrix: CodedMatrix) -> Floats:
    """[rows, outputs] float32."""
    of, rows = matrix.layout, rounded(x)
    outputs, inputs = matrix.codes.shape
    groups = inputs // GROUP
    scales, offsets = numbers(matrix)
    halves = 2 if of.halves else 1
    codes = matrix.codes.numpy().astype(np.int64).reshape(outputs, groups, halves, -1) - of.centre
    given = rows.codes.reshape(len(x), groups, halves, -1)
    sums = np.zeros((len(x), outputs), np.float32)
    for group in range(groups):
        for half in range(halves):
            whole = np.einsum("oi,ri->ro", codes[:, group, half], given[:, group, half])
            scale = scales[:, group, half][None] * rows.scales[:, group][:, None]
            sums = fused(whole.astype(np.float32), scale, sums)
        if offsets is not None:
            total = rows.scales[:, group] * given[:, group].sum(axis=(1, 2)).astype(np.float32)
            sums = fused(np.broadcast_to(offsets[:, group], sums.shape), total[:, None], sums)
    return sums


def numbers(matrix: CodedMatrix) -> tuple[Floats, Floats | None]:
    """Scales [outputs, groups, halves] and offsets [outputs, groups]."""
    of, factors = matrix.layout, matrix.factors
    outputs, groups = len(matrix.codes), matrix.codes.shape[1] // GROUP
    scales = matrix.scales.float().numpy()
    offsets = None if matrix.offsets is None else matrix.offsets.float().numpy()
    if factors is None:
        return scales.reshape(outputs, groups, -1), offsets
    whole = factors.numpy().reshape(outputs, -1, of.groups, factors.shape[2]).astype(np.float32)
    if of.halves:
        return ((whole - 128) * scales[:, :, :, None]).reshape(outputs, groups, 2), None
    if offsets is not None:
        offsets = (-offsets[:, :, None] * whole[..., 1]).reshape(outputs, groups)
    return (whole[..., :1] * scales[:, :, :, None]).reshape(outputs, groups, 1), offsets


def fused(a: NDArray[np.float32], b: NDArray[np.float32], c: Floats) -> Floats:
    """a * b + c rounded once: the product is exact in float64, and the sum is rounded to odd there."""
    exact, added = a.astype(np.float64) * b, c.astype(np.float64)
    total = exact + added
    back = total - exact
    missing = (exact - (total - back)) + (added - back)
    even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
    odd = np.where((missing != 0) & even, np.nextafter(total, np.where(missing > 0, np.inf, -np.inf)), total)
    return odd.astype(np.float32)


def random_matrix(layout: Int8Layout, outputs: int, inputs: int, seed: int = 0) -> CodedMatrix:
    generator = torch.Generator().manual_seed(seed)
    blocks = inputs // (GROUP * layout.groups)
    codes = torch.randint(0, 1 << layout.bits, (outputs, inputs), generator=generator).to(torch.uint8)
    numbers = torch.randn(2, outputs, blocks, layout.scales, generator=generator)
    scales, offsets = (part if layout.wide else part.half() for part in numbers)
    shape = outputs, inputs // GROUP, layout.group_factors
    factors = torch.randint(0, 256 if layout.halves else 64, shape, generator=generator).to(torch.uint8)
    return CodedMatrix(
        layout, codes, scales, offsets[..., 0] if layout.offsets else None, factors if layout.factors else None
    )

"""Finds the best of each row of scores, and the softmax's denominator, in a fraction of torch's time.

Of k groups' largest scores none is below the k-th largest of all groups, so only scores that reach it are ordered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.exponential import exp
from engine.kernels.jit_cache import cached_njit
from engine.kernels.simd import LANES, add, larger, largest, number_at, numbers_at, splat, total
from engine.kernels.subroutine import subroutine

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
_GROUPS = 4  # groups for each score wanted


class Top(NamedTuple):
    """The best scores of each row. values, indices: [rows, k], best first, ties by lower index; totals: [rows], sum of
    exp(score - best score).
    """

    values: Tensor
    indices: Tensor
    totals: Tensor


def top(scores: Tensor, k: int) -> Top:
    """Return the best k of each row. scores: [rows, columns] of bfloat16 or float32, at least k columns."""
    if not _is_quick(scores):
        return _in_torch(scores, k)
    values, indices = np.empty((len(scores), k), np.float32), np.empty((len(scores), k), np.int64)
    totals = np.empty(len(scores), np.float32)
    write_top(scores, values, indices, totals)
    return Top(torch.from_numpy(values), torch.from_numpy(indices), torch.from_numpy(totals))


def write_top(scores: Tensor, values: Floats, indices: Integers, totals: Floats) -> None:
    """Write `top` to arrays: making three tensors takes as long as finding the best of a row."""
    if _is_quick(scores):
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        _top(scores.data_ptr(), scores.stride(0), scores.itemsize, scores.shape[1], values, indices, totals)
    else:
        best = _in_torch(scores, values.shape[1])
        values[:], indices[:], totals[:] = (part.cpu().numpy() for part in best)


def _is_quick(scores: Tensor) -> bool:
    return scores.device.type == "cpu" and scores.dtype in (torch.bfloat16, torch.float32)


def _in_torch(scores: Tensor, k: int) -> Top:
    best = scores.float().topk(k)
    return Top(best.values, best.indices, (scores.float() - best.values[:, :1]).exp().sum(-1))


@cached_njit
def _top(scores: int, stride: int, width: int, columns: int, values: Any, indices: Any, totals: Any) -> None:
    k, vectors = values.shape[1], columns // LANES
    whole, together = vectors * LANES, max(1, vectors // (_GROUPS * k))  # vectors of a group
    peaks = np.empty(vectors // together, np.float32)
    for row in range(len(values)):
        at, best, place = scores + row * stride * width, values[row], indices[row]
        best[:], place[:] = -np.inf, 0
        for group in range(len(peaks)):
            most = numbers_at(at + group * together * LANES * width, width)
            for vector in range(group * together + 1, (group + 1) * together):
                most = larger(numbers_at(at + vector * LANES * width, width), most)
            peaks[group] = largest(most)
        least = np.partition(peaks, len(peaks) - k)[len(peaks) - k] if len(peaks) >= k else -np.inf
        count = 0
        for vector in range(vectors):
            wanted = best[k - 1] if count == k else least
            group, first = vector // together, vector * LANES
            if group < len(peaks) and not peaks[group] >= wanted:
                continue
            if together > 1 and not largest(numbers_at(at + first * width, width)) >= wanted:
                continue
            for column in range(first, first + LANES):
                value = number_at(at + column * width, width)
                if value >= least:
                    count = enter(value, column, best, place, count)
        for column in range(whole, columns):
            count = enter(number_at(at + column * width, width), column, best, place, count)
        peak = best[0]
        sums, down = splat(np.float32(0)), splat(-peak)
        for first in range(0, whole, LANES):
            sums = add(sums, exp(add(numbers_at(at + first * width, width), down)))
        rest = total(sums)
        for column in range(whole, columns):
            rest += np.exp(number_at(at + column * width, width) - peak)
        totals[row] = rest


@subroutine
def enter(value: Any, column: int, best: Any, place: Any, count: int) -> int:
    """Insert the value among the best, if it belongs there; return how many there are."""
    k = len(best)
    if count == k and not value > best[k - 1]:
        return count
    i = min(count, k - 1)
    while i > 0 and best[i - 1] < value:
        best[i], place[i] = best[i - 1], place[i - 1]
        i -= 1
    best[i], place[i] = value, column
    return min(count + 1, k)

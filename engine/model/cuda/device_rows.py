"""What the Triton attention is told of a batch's rows: where their texts and ancestors lie, and how the text that they
see is divided.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.core.batch import Int


class DeviceRows(NamedTuple):
    """What attention needs to know of a batch's rows, on the device, int32; see `engine.core.batch.Batch`.

    listed: the requests' block tables, then the rows' ancestors. table_of: [rows] and ancestor_ptr: [rows + 1] say
    where each one's begin. firsts, pairs, parts: see `Work`.
    """

    prefix_lens: Tensor
    ancestor_ptr: Tensor
    table_of: Tensor
    firsts: Tensor
    pairs: Tensor
    parts: Tensor
    listed: Tensor


class Work(NamedTuple):
    """How the text that rows see is divided. All are [rows + 1] and end with the total, as often as is needed.

    firsts: where each group begins, which is consecutive rows of one request. pairs: how many (group, chunk) pairs come
    before each group. parts: how many chunks come before each row's first.
    """

    firsts: Int
    pairs: Int
    parts: Int


def grouped(table_of: Int, most: int) -> Int:
    """Return [rows + 1] where each group begins: at most `most` consecutive rows of one request. Groups past the last
    are empty, so that every batch of as many rows has an array of the same length.
    """
    rows = np.arange(len(table_of))
    begins = np.flatnonzero(np.diff(table_of, prepend=-1))
    places = rows - np.repeat(begins, np.diff(begins, append=len(rows)))
    firsts = np.full(len(rows) + 1, len(rows), np.int32)
    starts = np.flatnonzero(places % most == 0)
    firsts[: len(starts)] = starts
    return firsts


def sums_before(numbers: Int, size: int) -> Int:
    """Return [size + 1]: the sum of the numbers before each place."""
    sums = np.zeros(size + 1, np.int32)
    sums[1 : len(numbers) + 1] = np.cumsum(numbers)
    sums[len(numbers) + 1 :] = sums[len(numbers)]
    return sums

"""Products of heads: each head of a row is multiplied by a matrix of its own, as multi-head latent attention needs it.

A head's rows are copied together first, since products take rows that lie together. A row has the same bits whatever
the others hold: products and copies treat each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray
from torch import Tensor

from engine.kernels.gemm.matmul import Matmul
from engine.kernels.records import record_of
from engine.kernels.simd import LANES, numbers_at, put_numbers
from engine.kernels.threads import address_of, barrier, int_fields, kernel, num_threads, run_step, thread_id

COPY = record_of(
    "rows",
    "heads",
    "size",  # bytes of a head's part, a multiple of 16 numbers
    "width",
    "source",
    "source_row",  # bytes from row to row
    "source_head",  # bytes from head to head
    "goal",
    "goal_row",
    "goal_head",
)


@kernel(COPY)
def copy_kernel(address: Any) -> None:
    """Copy a part of each head of each row."""
    work = carray(address, 1)[0]
    for unit in range(thread_id(), work.rows * work.heads, num_threads()):
        row, head = unit // work.heads, unit % work.heads
        source = work.source + row * work.source_row + head * work.source_head
        goal = work.goal + row * work.goal_row + head * work.goal_head
        for at in range(0, work.size, LANES * work.width):
            put_numbers(numbers_at(source + at, work.width), goal + at, work.width)


HEADS = record_of(
    "steps",  # [heads, 2]: addresses of a product's kernel and of its record
    "heads",
    "shared",  # 1: the products have scratch that all threads use together
)


@kernel(HEADS)
def heads_kernel(address: Any) -> None:
    """Compute the product of each head. The threads share each, and wait where they share scratch."""
    work = carray(address, 1)[0]
    for head in range(work.heads):
        run_step(work.steps + 16 * head)
        if work.shared != 0:
            barrier()


class HeadRecords:
    """The records of one layer's products of heads. address: of a HEADS record; of_batch: `rows` and `tiles` of the
    products, to be set for each batch.
    """

    def __init__(self, heads: Sequence[Matmul], x: Tensor, out: Tensor):
        """x: [heads, capacity, inputs]; out: [heads, capacity, outputs]."""
        ends = zip(heads, x, out, strict=True)
        self.products = np.concatenate(
            [one.record(len(rows), rows.data_ptr(), to.data_ptr()) for one, rows, to in ends]
        )
        steps = [(one.kernel.address, address_of(self.products, i)) for i, one in enumerate(heads)]
        self._steps, self._work = np.array(steps, np.int64), np.zeros(1, HEADS)
        self._work["steps"], self._work["heads"] = self._steps.ctypes.data, len(heads)
        self._work["shared"] = (self.products["shared_bytes"] + self.products["gate_bytes"]).any()
        self.address, self.of_batch = address_of(self._work), int_fields(self.products, "rows", "tiles")

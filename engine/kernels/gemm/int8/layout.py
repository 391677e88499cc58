"""How a row of x lies in memory for products with rows of 8 bits. The matrix lies in quads: see
`engine.kernels.quant.layouts`.

A row is rounded to codes of 8 bits in groups of 32 inputs, of which each is

    codes     [32] int8
    scale     float32
    offset    float32: scale * the sum of the codes, what an offset of 1 contributes
    sums      [3] int32: minus the sum of all codes, and of those of each half, what a bias of 1 contributes

Groups lie so that a kernel reads on: [blocks of rows, groups, rows of the block].
"""

from __future__ import annotations

from engine.kernels.quant.layouts import STEP as BLOCK_INPUTS
from engine.kernels.subroutine import subroutine

VECTORS = 8
"""Vectors of codes in a group."""
ROW_GROUP_BYTES = BLOCK_INPUTS + 20
"""Bytes of one group of a row of x."""
SCALE_AT, OFFSET_AT, SUMS_AT = BLOCK_INPUTS, BLOCK_INPUTS + 4, BLOCK_INPUTS + 8


@subroutine
def rows_at_once(left: int, most: int) -> int:
    """Return how many of the rows that are left to multiply next, at most `most`. The last block is not small:
    unpacking the codes costs as much as two rows.
    """
    return left if left <= most else min(most, left - most // 4)

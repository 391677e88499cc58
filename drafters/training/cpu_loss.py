"""The loss of rows over a vocabulary on a CPU, as one kernel.

Written out in torch (`drafters.training.loss`), some thirty operations pass over logits that no cache holds, and take
longer than all products of a step together. Here a row stays in the cache of the core that works on it, and its logits
are replaced by their gradient.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from engine.kernels.exponential import exp
from engine.kernels.simd import (
    FLOAT32,
    LANES,
    add,
    float_at,
    fma,
    larger,
    largest,
    load,
    maximum,
    minimum,
    multiply,
    number_at,
    numbers_at,
    put_float,
    put_numbers,
    splat,
    store,
    total,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import address_of, kernel, num_threads, thread_id

_ADDRESSES = ("teacher", "normalisers", "student", "losses", "best", "overlaps", "scratch")
LOSS_ROWS = np.dtype(
    [(name, "i8") for name in (*_ADDRESSES, "rows", "vocab", "width")]
    + [(name, "f4") for name in ("entropy", "distance", "scale", "unused")]
)
LOG_SUMS = np.dtype([(name, "i8") for name in ("logits", "sums", "rows", "vocab", "width")])
_STEEP = np.float32(1e30)  # any difference of probabilities times this is beyond -1 or 1, or as good as none


@kernel(LOSS_ROWS)
def loss_rows_kernel(address: Any) -> None:
    """Compute what `loss_rows` returns. normalisers: 0 where the vocabulary is the whole one; scratch: [threads, 2,
    vocab] float32, a row's p and q.
    """
    work = carray(address, 1)[0]
    row_bytes = work.vocab * work.width
    p = work.scratch + thread_id() * 2 * work.vocab * FLOAT32
    for row in range(thread_id(), work.rows, num_threads()):
        teacher, student, place = work.teacher + row * row_bytes, work.student + row * row_bytes, row * FLOAT32
        if work.normalisers:
            normaliser = float_at(work.normalisers + place)
        else:
            normaliser = _log_sum(teacher, work.vocab, work.width)
        _row(work, teacher, normaliser, student, place, p, p + work.vocab * FLOAT32)


@subroutine
def _peak(logits: int, vocab: int, width: int) -> Any:
    most = numbers_at(logits, width)
    for first in range(LANES, vocab, LANES):
        most = larger(numbers_at(logits + first * width, width), most)
    return largest(most)


@subroutine
def _log_sum(logits: int, vocab: int, width: int) -> Any:
    """Return log(sum(exp(logits)))."""
    peak = _peak(logits, vocab, width)
    down, sums = splat(-peak), splat(np.float32(0))
    for first in range(0, vocab, LANES):
        sums = add(sums, exp(add(numbers_at(logits + first * width, width), down)))
    return peak + np.float32(math.log(total(sums)))


@subroutine
def _row(work: Any, teacher: int, p_normaliser: Any, student: int, place: int, p: int, q: int) -> None:
    """Compute a row. place: of its float32 results; p, q: scratch, [vocab] float32 each."""
    vocab, width, zero = work.vocab, work.width, splat(np.float32(0))
    q_normaliser = _log_sum(student, vocab, width)
    p_down, q_down = splat(-p_normaliser), splat(-q_normaliser)
    masses, expected, overlaps, signed = zero, zero, zero, zero
    for first in range(0, vocab, LANES):
        z = numbers_at(student + first * width, width)
        p_here, q_here = exp(add(numbers_at(teacher + first * width, width), p_down)), exp(add(z, q_down))
        masses, expected = add(masses, p_here), fma(p_here, z, expected)
        overlaps, signed = add(overlaps, minimum(p_here, q_here)), fma(q_here, _sign(q_here, p_here), signed)
        store(p_here, p + first * FLOAT32, FLOAT32)
        store(q_here, q + first * FLOAT32, FLOAT32)
    mass, overlap = total(masses), total(overlaps)
    cross_entropy = mass * q_normaliser - total(expected)
    put_float(work.losses + place, work.entropy * cross_entropy + work.distance * (mass + 1 - 2 * overlap))
    put_float(work.overlaps + place, overlap)
    put_float(work.best + place, _first_peak(student, vocab, width))
    # the gradient by a logit is q * (entropy * mass + distance * (sign - signed)) - entropy * p, times the scale
    pull, push = splat(work.scale * work.distance), splat(-work.scale * work.entropy)
    level = splat(work.scale * (work.entropy * mass - work.distance * total(signed)))
    for first in range(0, vocab, LANES):
        p_here, q_here = load(p + first * FLOAT32, FLOAT32), load(q + first * FLOAT32, FLOAT32)
        gradient = fma(q_here, fma(pull, _sign(q_here, p_here), level), multiply(push, p_here))
        put_numbers(gradient, student + first * width, width)


@subroutine
def _sign(x: Any, y: Any) -> Any:
    """Return 1 where x is above y, -1 where it is below, 0 where they are equal."""
    one = splat(np.float32(1))
    steep = multiply(fma(y, splat(np.float32(-1)), x), splat(_STEEP))
    return maximum(minimum(steep, one), splat(np.float32(-1)))


@subroutine
def _first_peak(logits: int, vocab: int, width: int) -> Any:
    """Return the place of the largest number, the first of equal ones."""
    peak = _peak(logits, vocab, width)
    for first in range(0, vocab, LANES):
        if largest(numbers_at(logits + first * width, width)) >= peak:
            for column in range(first, first + LANES):
                if number_at(logits + column * width, width) >= peak:
                    return np.float32(column)
    return np.float32(0)


@kernel(LOG_SUMS)
def log_sums_kernel(address: Any) -> None:
    """Compute what `log_sums` returns."""
    work = carray(address, 1)[0]
    for row in range(thread_id(), work.rows, num_threads()):
        logits = work.logits + row * work.vocab * work.width
        put_float(work.sums + row * FLOAT32, _log_sum(logits, work.vocab, work.width))


def fits(dtype: torch.dtype, vocab: int) -> bool:
    """Return whether the kernel takes logits of this type over so many tokens."""
    return dtype in (torch.bfloat16, torch.float32) and vocab % LANES == 0


def loss_rows(
    teacher: Tensor, normaliser: Tensor | None, student: Tensor, entropy: float, distance: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each row, its likeliest id and its overlap with the teacher, [rows] float32 each.

    teacher, student: [rows, vocab] logits of one type, contiguous; normaliser: [rows] float32, of the teacher's logits
    over the whole vocabulary. scale: of the gradient, which replaces the student's logits.
    """
    rows, vocab = student.shape
    losses, best, overlaps = torch.empty(3, rows).unbind()
    scratch = torch.empty(torch.get_num_threads(), 2, vocab)
    work = np.zeros(1, LOSS_ROWS)
    held = teacher, normaliser, student, losses, best, overlaps, scratch
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in held]
    work[0] = (*addresses, rows, vocab, student.itemsize, entropy, distance, scale, 0.0)
    loss_rows_kernel()(address_of(work), rows)
    return losses, best, overlaps


def log_sums(logits: Tensor) -> Tensor:
    """Return log(sum(exp(row))) of each row, [rows] float32. logits: [rows, vocab], contiguous."""
    sums, work = torch.empty(len(logits)), np.zeros(1, LOG_SUMS)
    work[0] = logits.data_ptr(), sums.data_ptr(), *logits.shape, logits.itemsize
    log_sums_kernel()(address_of(work), len(logits))
    return sums

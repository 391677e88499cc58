"""The loss of rows over a vocabulary on CUDA, as one Triton kernel.

Written out in torch (`drafters.training.loss`), some thirty operations pass over logits that lie in the GPU's memory,
and take longer than all products of a step together. Here a row's logits are read once, held in registers, and
replaced by their gradient.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _loss_row(
    teacher,  # [rows, vocab] logits
    normalisers,  # [rows] float32, of the teacher's logits over the whole vocabulary, unless WHOLE
    student,  # [rows, vocab] logits; their gradient afterwards
    losses,  # out: [rows] float32
    best,  # out: [rows] int64
    overlaps,  # out: [rows] float32
    entropy,
    distance,
    scale,
    vocab,
    WHOLE: tl.constexpr,
    FILLED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, FILLED)
    inside = column < vocab
    z = tl.load(student + row * vocab + column, mask=inside, other=float("-inf")).to(tl.float32)
    t = tl.load(teacher + row * vocab + column, mask=inside, other=float("-inf")).to(tl.float32)
    if WHOLE:
        p = tl.exp(t - tl.max(t, 0))
        p = p / tl.sum(p, 0)
    else:
        p = tl.exp(t - tl.load(normalisers + row))
    peak = tl.max(z, 0)
    tl.store(best + row, tl.argmax(z, 0).to(tl.int64))
    q = tl.exp(z - peak)
    total = tl.sum(q, 0)
    q = q / total
    mass = tl.sum(p, 0)
    expected = tl.sum(tl.where(inside, p * z, 0.0), 0)
    overlap = tl.sum(tl.minimum(p, q), 0)
    cross_entropy = mass * (peak + tl.log(total)) - expected
    tl.store(losses + row, entropy * cross_entropy + distance * (mass + 1.0 - 2.0 * overlap))
    tl.store(overlaps + row, overlap)
    sign = tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
    pull = q * (sign - tl.sum(q * sign, 0))
    gradient = (entropy * (q * mass - p) + distance * pull) * scale
    tl.store(student + row * vocab + column, gradient.to(student.dtype.element_ty), mask=inside)


def loss_rows(
    teacher: Tensor, normaliser: Tensor | None, student: Tensor, entropy: float, distance: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each row, its likeliest id and its overlap with the teacher, [rows] each.

    teacher, student: [rows, vocab] logits, contiguous. scale: of the gradient, which replaces the student's logits.
    """
    rows, vocab = student.shape
    losses, overlaps = torch.empty(2, rows, device=student.device).unbind()
    best = torch.empty(rows, dtype=torch.int64, device=student.device)
    _loss_row[(rows,)](
        teacher,
        losses if normaliser is None else normaliser,
        student,
        losses,
        best,
        overlaps,
        float(entropy),
        float(distance),
        scale,
        vocab,
        WHOLE=normaliser is None,
        FILLED=triton.next_power_of_2(vocab),
        num_warps=min(16, max(4, triton.next_power_of_2(vocab) // 1024)),
    )
    return losses, best, overlaps

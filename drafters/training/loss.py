"""The loss of a draft step over a vocabulary. A head's logits and their gradients are as large as all else together, so
they are computed together, some rows at a time, and not kept: backward needs only the gradients of the factors. The
target's logits of a step's places are kept for the step, since several drafts have the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.training import cpu_loss
from engine.model.cuda.usable import runs_kernels

_ROWS = {"cpu": 1024, "cuda": 8192}  # rows at a time: a CPU's caches hold few, an accelerator is idle with few

FUSED_VOCABULARY = 32768
"""The largest draft vocabulary that `drafters.training.triton_loss` takes: a row of it fits into registers."""

Factors = Sequence[tuple[Tensor, Tensor]]
"""Pairs (x [n, d], weight [vocab, d]); the logits are the sum of the products x @ weight.T."""


@dataclass(frozen=True)
class Teacher:
    """The target's probabilities. hidden: [n, h]; head: [vocab, h], the output matrix's rows of the draft vocabulary;
    normaliser: [n] log-normalisers over the whole vocabulary, None where the draft vocabulary is the whole one. known:
    [m, vocab] logits that are computed already, and which of them each row's are, [n].
    """

    hidden: Tensor
    head: Tensor
    normaliser: Tensor | None
    known: tuple[Tensor, Tensor] | None = None

    def logits(self, rows: slice) -> Tensor:
        """Return [rows, vocab] logits over the draft vocabulary."""
        if self.known is not None:
            logits, places = self.known
            return logits[places[rows]]
        return self.hidden[rows] @ self.head.T

    def prob(self, rows: slice) -> Tensor:
        """Return [rows, vocab] float32 probabilities."""
        logits = self.logits(rows).float()
        if self.normaliser is None:
            return logits.softmax(-1)
        return logits.sub_(self.normaliser[rows, None]).exp_()


@dataclass(frozen=True)
class Verdicts:
    """For each row: its loss, the likeliest draft id, and the overlap sum(min(p, q)) with the target. All [n]."""

    loss: Tensor
    best: Tensor
    overlap: Tensor


def vocabulary_loss(factors: Factors, teacher: Teacher, entropy: float, distance: float) -> tuple[Tensor, Verdicts]:
    """Return the mean over rows of entropy * cross-entropy + distance * sum(|p - q|), and its parts by row."""
    found: list[Verdicts] = []
    flat = [tensor for pair in factors for tensor in pair]
    with torch.autocast(flat[0].device.type, enabled=False):  # sums over the vocabulary stay in float32
        loss = _Loss.apply(teacher, entropy, distance, found, *flat)
    return loss, found[0]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, teacher: Teacher, entropy: float, distance: float, found: list[Verdicts], *flat: Tensor
    ) -> Tensor:
        n, low, at_once = len(flat[0]), teacher.hidden.dtype, _ROWS[flat[0].device.type]
        inputs, weights = [x.to(low) for x in flat[0::2]], [w.to(low) for w in flat[1::2]]
        needed = ctx.needs_input_grad[4:]
        gradients = [torch.zeros_like(tensor) if wanted else None for tensor, wanted in zip(flat, needed, strict=True)]
        losses, best, overlap = (torch.empty(n, device=flat[0].device) for _ in range(3))
        fused = _kernel(teacher.hidden, len(teacher.head))
        for start in range(0, n, at_once):
            rows = slice(start, min(start + at_once, n))
            if fused is not None:
                parts, made = (entropy, distance, 1 / n), (losses, best, overlap)
                gradient = _fused(fused, teacher, inputs, weights, rows, parts, made)
                if any(needed):
                    _accumulate(gradients, gradient, inputs, weights, rows)
                continue
            p = teacher.prob(rows)
            z = (inputs[0][rows] @ weights[0].T).float()
            for x, w in zip(inputs[1:], weights[1:], strict=True):
                z += x[rows] @ w.T
            mass, normaliser = p.sum(-1), z.logsumexp(-1)
            best[rows] = z.argmax(-1).float()
            losses[rows] = entropy * (mass * normaliser - torch.linalg.vecdot(p, z))
            q = z.sub_(normaliser[:, None]).exp_()
            overlap[rows] = torch.minimum(p, q).sum(-1)
            losses[rows] += distance * (mass + 1 - 2 * overlap[rows])
            if any(needed):
                gradient = _gradient(p, q, mass, entropy, distance).div_(n)
                _accumulate(gradients, gradient.to(low), inputs, weights, rows)
        ctx.gradients = gradients
        found.append(Verdicts(losses, best.long(), overlap))
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return (None, None, None, None, *(None if g is None else g.mul_(outer[0]) for g in ctx.gradients))


_LossRows = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _kernel(like: Tensor, vocab: int) -> _LossRows | None:
    """Return the kernel that takes logits of this device, type and vocabulary; None if there is none."""
    if like.device.type == "cpu":
        return cpu_loss.loss_rows if cpu_loss.fits(like.dtype, vocab) else None
    if vocab > FUSED_VOCABULARY or not runs_kernels(like.device):
        return None
    from drafters.training.triton_loss import loss_rows

    return loss_rows


def _fused(
    loss_rows: _LossRows,
    teacher: Teacher,
    inputs: list[Tensor],
    weights: list[Tensor],
    rows: slice,
    parts: tuple[float, float, float],
    found: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Compute one chunk by the kernel: fill `found`, the losses, best ids and overlaps; return the logits' gradient.
    parts: the weights of entropy and distance, and the gradient's scale.
    """
    z = inputs[0][rows] @ weights[0].T
    for x, w in zip(inputs[1:], weights[1:], strict=True):
        z = z.addmm_(x[rows], w.T)
    normaliser = None if teacher.normaliser is None else teacher.normaliser[rows]
    made = loss_rows(teacher.logits(rows), normaliser, z, *parts)
    for out, values in zip(found, made, strict=True):
        out[rows] = values
    return z


def _gradient(p: Tensor, q: Tensor, mass: Tensor, entropy: float, distance: float) -> Tensor:
    """Return the gradient of the loss with respect to the logits, [rows, vocab]; overwrites p."""
    pull = None
    if distance:
        sign = (q - p).sign_()
        pull = sign.sub_(torch.linalg.vecdot(q, sign)[:, None]).mul_(q)
    gradient = p.neg_().addcmul_(q, mass[:, None])
    if entropy != 1:
        gradient *= entropy
    return gradient if pull is None else gradient.add_(pull, alpha=distance)


def _accumulate(
    gradients: list[Tensor | None], gradient: Tensor, inputs: list[Tensor], weights: list[Tensor], rows: slice
) -> None:
    """Pass the logits' gradient [rows, vocab] on to the factors."""
    for place, (x, w) in enumerate(zip(inputs, weights, strict=True)):
        of_input, of_weight = gradients[2 * place], gradients[2 * place + 1]
        if of_input is not None:
            of_input[rows] = (gradient @ w).to(of_input.dtype)
        if of_weight is not None:
            of_weight += gradient.T @ x[rows]

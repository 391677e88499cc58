"""The loss kernel against the loss written out in torch, through Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

from drafters.training.loss import Teacher, vocabulary_loss
from drafters.training.triton_loss import loss_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("is_whole", "weights", "vocab"),
    [(True, (0.3, 0.7), 41), (False, (0.3, 0.7), 200), (True, (1.0, 0.0), 200), (False, (1.0, 0.0), 64)],
)
def test_the_kernel_computes_the_loss_and_its_gradient_by_the_logits(
    is_whole: bool, weights: tuple[float, float], vocab: int
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows = 9
    teacher = 3 * torch.randn(rows, vocab, generator=generator)
    student = (3 * torch.randn(rows, vocab, generator=generator)).requires_grad_()
    normaliser = None if is_whole else teacher.logsumexp(-1) + 0.1  # some of the target's tokens are not drafted
    identity = torch.eye(vocab)
    loss, expected = vocabulary_loss([(student, identity)], Teacher(teacher, identity, normaliser), *weights)
    [gradient] = torch.autograd.grad(loss, student)
    logits = student.detach().clone().to(DEVICE)
    made = loss_rows(
        teacher.to(DEVICE), None if normaliser is None else normaliser.to(DEVICE), logits, *weights, 1 / rows
    )
    losses, best, overlap = (values.cpu() for values in made)
    torch.testing.assert_close(losses, expected.loss)
    assert best.tolist() == expected.best.tolist()
    torch.testing.assert_close(overlap, expected.overlap)
    torch.testing.assert_close(logits.cpu(), gradient, atol=1e-6, rtol=1e-4)

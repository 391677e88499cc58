"""The loss kernel of a CPU against the loss written out in torch."""

from __future__ import annotations

import pytest
import torch

from drafters.training import cpu_loss
from drafters.training.cpu_loss import log_sums, loss_rows
from drafters.training.loss import Teacher, vocabulary_loss

ROWS, VOCAB = 9, 48


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.3, 0.7)])
@pytest.mark.parametrize("is_whole", [False, True])
def test_the_kernel_computes_the_loss_and_its_gradient_by_the_logits(
    is_whole: bool, weights: tuple[float, float], dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (3 * torch.randn(2, ROWS, VOCAB, generator=generator)).to(dtype).unbind()
    teacher[:3] = student[:3]  # the same distribution, where the distance has no slope
    normaliser = None if is_whole else teacher.float().logsumexp(-1) + 0.1  # not all is drafted
    logits = student.double().requires_grad_()
    p = teacher.double() - (teacher.double().logsumexp(-1) if normaliser is None else normaliser)[:, None]
    p, q = p.exp(), logits.softmax(-1)
    entropy, distance = -(p * logits.log_softmax(-1)).sum(-1), (p - q).abs().sum(-1)
    expected = weights[0] * entropy + weights[1] * distance
    [gradient] = torch.autograd.grad(expected.sum() / ROWS, logits)
    losses, best, overlap = loss_rows(teacher, normaliser, moved := student.clone(), *weights, 1 / ROWS)
    torch.testing.assert_close(losses.double(), expected, atol=1e-5, rtol=1e-4)
    assert best.tolist() == student.argmax(-1).tolist()
    torch.testing.assert_close(overlap.double(), torch.minimum(p, q).sum(-1), atol=1e-5, rtol=1e-4)
    if weights[1]:
        moved, gradient = moved[3:], gradient[3:]
    torch.testing.assert_close(moved.double(), gradient, atol=tolerance, rtol=1e-2)


def test_the_first_of_equal_logits_is_the_likeliest_one() -> None:
    student = torch.zeros(2, VOCAB)
    student[0, [20, 37]] = 5.0
    assert loss_rows(torch.zeros(2, VOCAB), None, student, 1.0, 0.0, 1.0)[1].tolist() == [20, 0]


@pytest.mark.parametrize("fitting", [True, False])
def test_the_kernel_and_torch_make_the_loss_of_factors_that_is_written_out_here(
    fitting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_loss, "fits", lambda dtype, vocab: fitting)
    generator = torch.Generator().manual_seed(1)
    hidden, head, *factors = (
        torch.randn(shape, generator=generator).requires_grad_(i > 1)
        for i, shape in enumerate([(7, 5), (VOCAB, 5), (7, 5), (VOCAB, 5), (7, 3), (VOCAB, 3)])
    )
    x, weight, link, second = factors
    normaliser = (hidden @ head.T).logsumexp(-1) + 0.1
    p, logits = (hidden @ head.T - normaliser[:, None]).exp(), x @ weight.T + link @ second.T
    entropy, distance = -(p * logits.log_softmax(-1)).sum(-1), (p - logits.softmax(-1)).abs().sum(-1)
    expected = (0.3 * entropy + 0.7 * distance).mean()
    loss, verdicts = vocabulary_loss([(x, weight), (link, second)], Teacher(hidden, head, normaliser), 0.3, 0.7)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    assert verdicts.best.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(verdicts.overlap, torch.minimum(p, logits.softmax(-1)).sum(-1), atol=1e-5, rtol=1e-4)
    gradients = [torch.autograd.grad(one, factors, retain_graph=True) for one in (loss, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sums_of_rows_are_those_of_torch(dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(6, 96, generator=torch.Generator().manual_seed(2))).to(dtype)
    torch.testing.assert_close(log_sums(logits), logits.float().logsumexp(-1), atol=1e-5, rtol=1e-5)

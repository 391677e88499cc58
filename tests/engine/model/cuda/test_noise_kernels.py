"""Draws of many rows in one kernel, through Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

from engine.model.cuda import noise_kernels
from engine.model.cuda.noise_kernels import Draw, drawn, noisy_scores
from engine.sampling.argmax import NAN
from engine.sampling.noise import gumbel, gumbel_argmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = torch.inf


def logits_of(rows: int, vocab: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    return logits.to(DEVICE, dtype)


def expected(logits: Tensor, draws: list[Draw]) -> list[int]:
    """Drawn on the CPU, one by one."""
    rows = logits.cpu().float()
    return [gumbel_argmax(rows[one.row] / one.temperature, one.seed, one.position) for one in draws]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 25.0, 1e-3])
@pytest.mark.parametrize("vocab", [5, 2048, 5000])
def test_draws_are_those_of_the_cpu_one_by_one(vocab: int, temperature: float) -> None:
    logits = logits_of(4, vocab)
    draws = [Draw(row, temperature, 7 - 9 * row, 100 + row) for row in (3, 1, 2, 1)]
    assert drawn(logits, draws) == expected(logits, draws)


def test_float32_logits_are_drawn_from_as_they_are() -> None:
    logits = logits_of(2, 3000, torch.float32)
    draws = [Draw(0, 0.8, 2**63 + 5, 9), Draw(1, 1.0, 3, 0)]
    assert drawn(logits, draws) == expected(logits, draws)


def test_infinities_and_what_is_no_number_are_as_on_the_cpu() -> None:
    logits = torch.zeros(4, 5000)
    logits[0, 4500], logits[1, [9, 4000]], logits[2], logits[3, 7:] = torch.nan, INF, -INF, -INF
    draws = [Draw(row, 1.0, 1, 2) for row in range(4)]
    found = drawn(logits.to(DEVICE), draws)
    assert found == expected(logits, draws) and found[:2] == [NAN, 9]


@pytest.mark.parametrize("near", [(10, 4000), (10, 11)], ids=["in two parts", "in one part"])
def test_tokens_that_come_near_each_other_are_compared_with_the_cpus_logarithms(
    near: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device finds the first of two; the CPU's noise is a little more for the second."""
    one, other = near
    logits = torch.full((1, 5000), -1e9, dtype=torch.float32)
    noise = gumbel(1, 2, torch.arange(5000))
    logits[0, list(near)] = (40 - noise[list(near)]).float()
    draws = [Draw(0, 1.0, 1, 2)]
    monkeypatch.setattr(noise_kernels, "_TOLERANCE", noise_kernels.tl.constexpr(1e-3))
    monkeypatch.setattr(noise_kernels, "_NEAR", 1e-3)
    assert drawn(logits.to(DEVICE), draws) == expected(logits, draws)
    raised = logits.clone()
    raised[0, other] += 1e-4
    assert drawn(raised.to(DEVICE), draws) == expected(raised, draws) == [other]
    raised[0, one] += 2e-4
    assert drawn(raised.to(DEVICE), draws) == expected(raised, draws) == [one]


def test_of_parts_whose_winners_are_near_each_other_the_cpus_logarithms_decide() -> None:
    """The kernel's estimates say otherwise."""
    draw, tokens = Draw(0, 1.0, 5, 6), [3, 4000]
    noise = gumbel(draw.seed, draw.position, torch.tensor(tokens)).numpy()
    scores = np.array([1 + 4e-10, 1.0]) - noise
    found = np.array([[[1.0, 1 + 1e-10]], [tokens], [scores], [[1.0, 1.0]]])
    assert noise_kernels._joined(torch.zeros(1, 5000), [draw], found) == [tokens[0]]


@pytest.mark.parametrize("near", [0.0, 2.0])
def test_a_row_whose_best_part_has_several_near_the_best_or_none_is_drawn_on_the_cpu(near: float) -> None:
    """None: the best is infinite."""
    logits, draw = logits_of(1, 5000).cpu(), Draw(0, 1.0, 5, 6)
    found = np.array([[[9.0, 1.0]], [[17.0, 4000.0]], [[9.0, 1.0]], [[near, 1.0]]])
    assert noise_kernels._joined(logits, [draw], found) == expected(logits, [draw]) != [17]


def test_heads_score_with_the_noise_of_the_tokens_of_their_own_vocabulary() -> None:
    scores, ids = logits_of(3, 5000, torch.float32), torch.randperm(9000, generator=torch.Generator().manual_seed(1))
    ids = ids[:5000].to(DEVICE)
    found = noisy_scores(scores.clone(), ids, [(3, 11, 2.0), (3, 12, 0.0), (-4, 11, 0.5)])
    assert torch.allclose(found[0], (scores[0] + gumbel(3, 11, ids).float().to(DEVICE)) * 2, atol=1e-5)
    assert torch.equal(found[1], scores[1])
    assert torch.allclose(found[2], (scores[2] + gumbel(-4, 11, ids).float().to(DEVICE)) * 0.5, atol=1e-5)

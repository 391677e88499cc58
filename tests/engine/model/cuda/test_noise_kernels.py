"""Noisy scores of many rows in one kernel, through Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

from engine.model.cuda.noise_kernels import draw_tokens, noise_keys, noisy_scores
from engine.sampling.argmax import argmax
from engine.sampling.noise import gumbel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits_of(rows: int, vocab: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    return logits.to(DEVICE, dtype)


def test_heads_score_with_the_noise_of_the_tokens_of_their_own_vocabulary() -> None:
    scores, ids = logits_of(3, 5000, torch.float32), torch.randperm(9000, generator=torch.Generator().manual_seed(1))
    ids = ids[:5000].to(DEVICE)
    found = noisy_scores(scores.clone(), ids, noise_keys([(3, 11), (3, 12), (-4, 11)]), [2.0, 0.0, 0.5])
    assert torch.allclose(found[0], (scores[0] + gumbel(3, 11, ids).float().to(DEVICE)) * 2, atol=1e-5)
    assert torch.equal(found[1], scores[1])
    assert torch.allclose(found[2], (scores[2] + gumbel(-4, 11, ids).float().to(DEVICE)) * 0.5, atol=1e-5)


def test_a_greedy_draw_takes_both_zeros_for_equals_as_the_argmax_does() -> None:
    logits = torch.full((2, 3000), -1.0, dtype=torch.bfloat16)
    logits[0, 7], logits[0, 2500] = -0.0, 0.0
    logits[1, 5], logits[1, 9] = 0.0, -0.0
    tokens, rows = torch.empty(2, dtype=torch.int32, device=DEVICE), torch.arange(2, dtype=torch.int32, device=DEVICE)
    keys, greedy = noise_keys([(0, 0)] * 2).to(DEVICE), torch.zeros(2, device=DEVICE)
    draw_tokens(logits.to(DEVICE), rows, keys, greedy, tokens)
    assert tokens.tolist() == argmax(logits) == [7, 5]

"""What a block head's rows predict: the link's products, and chances from scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from drafters.block_forward import likeliest
from drafters.markov_link import Gate, Link


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rank", [6, 32])
def test_a_link_adds_what_a_plain_product_gives(rank: int, gated: bool, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(2)
    first, second, said = (torch.randn(n, rank, generator=drawn).to(dtype) for n in (30, 20, 30))
    link = object.__new__(Link)
    link.first, link.second = (F.pad(one, (0, -rank % 16)) for one in (first, second))
    link.gate = Gate(torch.empty(0), F.pad(said, (0, -rank % 16))) if gated else None
    gates, tokens = torch.randn(3, rank, generator=drawn), torch.tensor([29, 0, 7])
    candidates = torch.tensor([[19, 0, 3, 4], [5, 6, 7, 8], [1, 1, 2, 2]])
    scores = np.ones((3, 4), np.float32)
    link.add(scores, candidates.numpy(), F.pad(gates, (0, -rank % 16)).numpy(), tokens.numpy(), 2.0)
    linked = first[tokens].float()
    if gated:
        linked = torch.sigmoid(gates + said[tokens].float()) * linked
    expected = 1 + 2 * (second[candidates].float() @ linked[:, :, None])[:, :, 0]
    torch.testing.assert_close(torch.from_numpy(scores), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scores", [[-200.0, -300.0, -250.0], [0.0, -torch.inf, -1.0], [90.0, 60.0, 89.0]])
@pytest.mark.parametrize("rest", [0.0, 2.0])
def test_chances_are_a_softmax_however_far_apart_scores_are(scores: list[float], rest: float) -> None:
    places, chances = np.zeros((1, 2), np.int64), np.empty((1, 2), np.float32)
    given = np.array([scores], np.float32)
    likeliest(given, np.array([rest], np.float32), np.array([0.5], np.float32), places, chances)
    exact = torch.tensor([*scores, math.log(rest) if rest else -torch.inf], dtype=torch.float64).softmax(0)
    assert places[0, 0] == 0 and chances[0].tolist() == pytest.approx((0.5 * exact[places[0]]).tolist(), abs=1e-6)

"""What a block head's rows predict: the link's products, and chances from scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from drafters.heads.one_pass.block_forward import likeliest
from drafters.heads.one_pass.markov_link import NO_LINK, Gate, Link


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
    scores, padded = np.ones((3, 4), np.float32), F.pad(gates, (0, -rank % 16)).numpy()
    for row in range(3):
        link.add(scores[row], candidates[row].numpy(), padded[row], int(tokens[row]))
    linked = first[tokens].float()
    if gated:
        linked = torch.sigmoid(gates + said[tokens].float()) * linked
    expected = 1 + (second[candidates].float() @ linked[:, :, None])[:, :, 0]
    torch.testing.assert_close(torch.from_numpy(scores), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scores", [[-200.0, -250.0, -300.0], [0.0, -1.0, -torch.inf], [90.0, 89.0, 60.0]])
@pytest.mark.parametrize("rest", [0.0, 2.0])
def test_chances_are_a_softmax_however_far_apart_scores_are(scores: list[float], rest: float) -> None:
    given = torch.tensor(scores, dtype=torch.float64)
    totals = ((given - given[0]).exp().sum() + rest).float()
    probs = predicted(scores, float(totals))
    exact = torch.cat([given - given[0], torch.tensor([rest]).log()]).softmax(0)
    assert probs == pytest.approx((0.5 * exact[:2]).tolist(), abs=1e-6)


def predicted(scores: list[float], totals: float) -> list[float]:
    """Chances of the two best of a row whose tokens are right in half of all cases."""
    ids, probs = np.zeros((1, 2), np.int64), np.empty((1, 2), np.float32)
    row, half = np.zeros(1, np.int64), np.full(1, 0.5, np.float32)
    of_row = np.array([scores], np.float32), np.array([totals], np.float32), np.arange(7, 10)[None]
    none = np.zeros((1, 0), np.float32)
    likeliest(NO_LINK, row, row, *of_row, none, none[:0], half, np.float32(1), ids, probs)
    assert ids[0].tolist() == [7, 8]
    return [float(prob) for prob in probs[0]]

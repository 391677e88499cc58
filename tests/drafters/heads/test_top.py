"""The best of each row of scores."""

from __future__ import annotations

import pytest
import torch

from drafters.heads.top import top


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 10, 128])
@pytest.mark.parametrize("columns", [128, 700, 5003])
def test_the_best_come_in_order_and_ties_by_lower_index(columns: int, k: int, dtype: torch.dtype) -> None:
    scores = (2 * torch.randn(5, columns, generator=torch.Generator().manual_seed(columns))).to(dtype)  # bfloat16: ties
    best = top(scores, k)
    ordered = scores.float().sort(dim=1, descending=True, stable=True)
    assert best.values.equal(ordered.values[:, :k]) and best.indices.equal(ordered.indices[:, :k])
    torch.testing.assert_close(best.totals, (scores.float() - best.values[:, :1]).exp().sum(1))


def test_scores_that_were_ruled_out_come_last() -> None:
    scores = torch.full((1, 640), -torch.inf)
    scores[0, [3, 639]] = torch.tensor([1.0, 2.0])
    best = top(scores, 4)
    assert best.indices[0, :2].tolist() == [639, 3] and best.values[0, 2:].tolist() == [-torch.inf] * 2


def test_rows_may_be_part_of_a_wider_matrix() -> None:
    wide = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    for one, other in zip(top(wide[:, :200], 7), top(wide[:, :200].contiguous(), 7), strict=True):
        assert one.equal(other)

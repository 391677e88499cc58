"""Candidates at T = 0 and, with the target's noise, at T > 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafters.heads.growth.ranking import ErrorScale, Ranking
from engine.core.params import SamplingParams
from engine.sampling.noise import gumbel, gumbel_argmax

VOCAB = 300
IDS = torch.arange(VOCAB)


def random_logits(n: int, seed: int) -> Tensor:
    """About the entropy of a language model's next token."""
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.5


def test_greedy_candidates_are_the_heads_best_with_their_softmax_and_so_is_the_order_without_shared_noise() -> None:
    logits = random_logits(4, 0)
    seen = Ranking(SamplingParams(), IDS, 5)(logits, [7, 7, 7, 7])
    best = logits.softmax(-1).topk(5)
    assert seen.tokens == best.indices.tolist()
    torch.testing.assert_close(torch.tensor(seen.prob), best.values)
    alone = Ranking(SamplingParams(temperature=2.0, seed=3), IDS, 5, shared_noise=False)
    assert alone(logits, [7, 7, 7, 7]).tokens == best.indices.tolist()


@pytest.mark.parametrize("ids", [IDS, IDS.flip(0)[:100]])
def test_with_shared_noise_the_order_is_that_of_the_targets_draw_of_its_own_ids(ids: Tensor) -> None:
    params, logits = SamplingParams(temperature=0.7, seed=11), random_logits(3, 1)[:, : len(ids)]
    seen = Ranking(params, ids, 4)(logits, [20, 21, 20])
    for row, position in enumerate([20, 21, 20]):
        scores = logits[row].double() / 0.7 + gumbel(11, position, ids)
        assert seen.tokens[row] == ids[scores.topk(4).indices].tolist()
        assert len(ids) < VOCAB or seen.tokens[row][0] == gumbel_argmax(logits[row] / 0.7, 11, position)


def acceptance(shared_noise: bool, draws: int = 400) -> tuple[list[bool], list[float]]:
    """Whether the first candidate is the target's draw, and the chance claimed; the head errs by a unit normal."""
    logits, error = random_logits(draws, 4), torch.randn(draws, VOCAB, generator=torch.Generator().manual_seed(9))
    ranking = Ranking(SamplingParams(temperature=1.0, seed=1), IDS, 4, shared_noise, ErrorScale(0.6))
    hits, probs = [], []
    for row in range(draws):
        seen = ranking(logits[row : row + 1] + error[row], [row])
        hits.append(seen.tokens[0][0] == gumbel_argmax(logits[row], 1, row))
        probs.append(seen.prob[0][0])
    return hits, probs


def test_shared_noise_guesses_far_more_of_the_targets_draws() -> None:
    with_noise, without = acceptance(True)[0], acceptance(False)[0]
    assert sum(with_noise) > 1.5 * sum(without)


def test_the_claimed_chance_is_near_the_observed_one_where_it_is_high_and_where_it_is_low() -> None:
    hits, probs = (torch.tensor(values).float() for values in acceptance(True, 800))
    order = probs.argsort()
    for part in order.chunk(3):
        assert abs(hits[part].mean() - probs[part].mean()) < 0.1


def test_the_heads_error_is_learnt_from_the_draws() -> None:
    """From far off on either side to where the claimed chances fit: a head that errs by a unit normal has 0.6."""
    for start in (0.1, 4.0):
        error = ErrorScale(start)
        ranking = Ranking(SamplingParams(temperature=0.8, seed=2), IDS, 1, error=error)
        for row in range(300):
            logits = random_logits(1, row)
            miss = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(10**6 + row))
            ranking.learn(logits + miss, row, gumbel_argmax(logits[0] / 0.8, 2, row))
        assert 0.4 < error.value < 0.9


def test_tokens_the_request_rules_out_get_no_chance() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0, -1.0]])
    for params in (
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.1),
    ):
        for shared in (True, False):
            seen = Ranking(params, torch.arange(4), 4, shared)(logits, [0])
            assert {t for t, c in zip(seen.tokens[0], seen.prob[0], strict=True) if c > 0} == {0, 1}


def test_old_noise_is_forgotten() -> None:
    ranking = Ranking(SamplingParams(temperature=1.0), IDS, 2)
    for position in range(200):
        ranking(random_logits(1, 0), [position])
    assert len(ranking._noise) <= 65


@pytest.mark.parametrize("truncated", [False, True])
def test_a_kernel_scores_the_rows_of_all_requests_as_each_ones_own_are(
    truncated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, sampled, and sampled without the noise, in one call."""
    kernels = pytest.importorskip("engine.model.cuda.noise_kernels")
    ids, error = torch.randperm(90, generator=torch.Generator().manual_seed(2))[:40], ErrorScale(0.6)
    warm = SamplingParams(temperature=0.7, seed=5, top_p=0.8 if truncated else None)
    asked = [
        (
            Ranking(params, ids, 4, shared, error),
            torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows)),
            at,
        )
        for params, shared, rows, at in [
            (SamplingParams(temperature=0.0), True, 2, [7, 8]),
            (warm, True, 3, [9, 10, 9]),
            (SamplingParams(temperature=0.7, top_k=1), True, 1, [4]),
            (SamplingParams(temperature=1.3, seed=5), False, 4, [4] * 4),
            (SamplingParams(temperature=1.3, seed=-6), True, 5, [4, 5, 6, 7, 8]),
        ]
    ]
    expected = torch.cat([ranking.scores(logits, at) for ranking, logits, at in asked])
    monkeypatch.setattr("drafters.heads.growth.ranking._kernels", lambda device: kernels)
    assert torch.allclose(Ranking.scores_of(asked), expected, atol=1e-5)
    tokens, prob = Ranking.best_of_all(asked)
    monkeypatch.undo()
    of_torch = Ranking.best_of_all(asked)
    assert torch.equal(tokens, of_torch[0]) and torch.allclose(prob, of_torch[1], atol=1e-5)

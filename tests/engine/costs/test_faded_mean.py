from __future__ import annotations

import pytest

from engine.costs.faded_mean import FadedMean


def test_the_prior_counts_for_as_many_observations_as_it_is_told() -> None:
    mean = FadedMean(memory=1e9)
    assert mean.mean(3.0, 2.0) == 3.0
    for value in (1.0, 0.0):
        mean.observe(value)
    assert mean.mean(3.0, 2.0) == pytest.approx((1 + 2 * 3) / 4) and mean.mean() == pytest.approx(0.5)


def test_every_observation_takes_its_share_of_the_earlier_ones() -> None:
    mean = FadedMean(memory=4)
    for _ in range(3):
        mean.observe(2.0)
    assert (mean.count, mean.total) == pytest.approx((1 + 0.75 + 0.75**2, 2 * (1 + 0.75 + 0.75**2)))


def test_nothing_fades_before_the_count_is_full_and_then_it_stays_so() -> None:
    mean = FadedMean(memory=4, full=4)
    for value in (1.0, 1.0, 1.0, 1.0, 0.0):
        mean.observe(value)
    assert (mean.count, mean.total) == (4, 3)


def test_an_observation_may_be_of_many_or_of_none_and_fades_the_others_all_the_same() -> None:
    mean = FadedMean(memory=2)
    mean.observe(6.0, 3.0)
    mean.observe(0.0, 0.0)
    assert (mean.count, mean.total) == (1.5, 3.0)

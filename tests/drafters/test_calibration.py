from __future__ import annotations

import pytest

from drafters.calibration import Calibrator


def test_without_observations_the_prior_stands() -> None:
    assert Calibrator().prob(1, 3, prior=0.3) == 0.3


def test_chances_go_to_the_observed_acceptance() -> None:
    calibrator = Calibrator()
    for i in range(1000):
        calibrator.observe(1, 3, accepted=i % 4 == 0)
    assert calibrator.prob(1, 3, prior=0.9) == pytest.approx(0.25, abs=0.01)
    assert calibrator.prob(2, 3, prior=0.9) == 0.9
    assert calibrator.prob(1, 2, prior=0.9) == 0.9


def test_a_drafter_that_stops_being_right_fades() -> None:
    calibrator = Calibrator(memory=100)
    for _ in range(5000):
        calibrator.observe(1, 0, accepted=True)
    for _ in range(500):
        calibrator.observe(1, 0, accepted=False)
    assert calibrator.prob(1, 0, prior=0.5) < 0.05


def test_the_prior_counts_for_eight_observations() -> None:
    calibrator = Calibrator()
    calibrator.observe(1, 3, accepted=True)
    assert calibrator.prob(1, 3, prior=0.3) == pytest.approx((1 + 8 * 0.3) / (1 + 8))


def test_counts_stay_at_the_memory_and_what_they_hold_fades_by_a_share() -> None:
    calibrator = Calibrator(memory=4)
    for accepted in (True, True, True, True, False, False):
        calibrator.observe(2, 3, accepted)
    assert calibrator.prob(2, 3, prior=0.0) == pytest.approx(2.25 / (4 + 8))


def test_two_thousand_observations_are_remembered() -> None:
    calibrator = Calibrator()
    for _ in range(2500):
        calibrator.observe(1, 0, accepted=True)
    assert calibrator.prob(1, 0, prior=0.0) == pytest.approx(2000 / (2000 + 8))

from __future__ import annotations

import numpy as np
import pytest

from drafters.calibration import Calibrator


def test_without_observations_the_prior_stands() -> None:
    assert Calibrator().chance(1, 3, prior=0.3) == 0.3


def test_chances_go_to_the_observed_acceptance() -> None:
    calibrator = Calibrator()
    for i in range(1000):
        calibrator.observe(1, 3, accepted=i % 4 == 0)
    assert calibrator.chance(1, 3, prior=0.9) == pytest.approx(0.25, abs=0.01)
    assert calibrator.chance(2, 3, prior=0.9) == 0.9
    assert calibrator.chance(1, 2, prior=0.9) == 0.9


def test_a_drafter_that_stops_being_right_fades() -> None:
    calibrator = Calibrator(memory=100)
    for _ in range(5000):
        calibrator.observe(1, 0, accepted=True)
    for _ in range(500):
        calibrator.observe(1, 0, accepted=False)
    assert calibrator.chance(1, 0, prior=0.5) < 0.05


def test_counts_go_to_another_calibrator() -> None:
    calibrator, again = Calibrator(), Calibrator()
    for _ in range(9):
        calibrator.observe(2, 1, accepted=True)
    again.recall(calibrator.cells())
    assert again.chance(2, 1, 0.1) == calibrator.chance(2, 1, 0.1) > 0.5
    again.recall(Calibrator().cells())
    assert again.cells().tolist() == calibrator.cells().tolist()


@pytest.mark.parametrize("cells", [[[1, 2, 3]], [[1, 1, 5, 4]], [[1, 1, -1, 4]], [1, 2, 3, 4]])
def test_counts_that_cannot_be_are_refused(cells: list[list[float]]) -> None:
    with pytest.raises(ValueError):
        Calibrator().recall(np.asarray(cells, np.float64))


def test_the_prior_counts_for_eight_observations() -> None:
    calibrator = Calibrator()
    calibrator.observe(1, 3, accepted=True)
    assert calibrator.chance(1, 3, prior=0.3) == pytest.approx((1 + 8 * 0.3) / (1 + 8))


def test_counts_stay_at_the_memory_and_what_they_hold_fades_by_a_share() -> None:
    calibrator = Calibrator(memory=4)
    for accepted in (True, True, True, True, False, False):
        calibrator.observe(2, 3, accepted)
    assert calibrator.cells().tolist() == [[2, 3, 2.25, 4.0]]


def test_two_thousand_observations_are_remembered() -> None:
    calibrator = Calibrator()
    for _ in range(2500):
        calibrator.observe(1, 0, accepted=True)
    assert calibrator.cells()[:, 2:].tolist() == [[pytest.approx(2000), pytest.approx(2000)]]


def test_what_never_was_accepted_can_be_recalled_too() -> None:
    calibrator = Calibrator()
    calibrator.recall(np.asarray([[1.0, 3, 0, 8], [2.0, 3, 0.5, 8]]))
    assert calibrator.chance(1, 3, prior=1.0) == 0.5
    with pytest.raises(ValueError, match=r"^counts that no calibrator has$"):
        calibrator.recall(np.zeros((1, 5)))

from __future__ import annotations

import numpy as np
import pytest

from drafters.calibration import Calibrator
from engine.tree import TokenTree


def test_without_observations_the_prior_stands() -> None:
    assert Calibrator().chance(1, 1, 3, prior=0.3) == 0.3


def test_chances_go_to_the_observed_acceptance() -> None:
    calibrator = Calibrator()
    for i in range(1000):
        calibrator.observe(1, 1, 3, accepted=i % 4 == 0)
    assert calibrator.chance(1, 1, 3, prior=0.9) == pytest.approx(0.25, abs=0.01)
    assert calibrator.chance(1, 2, 3, prior=0.9) == 0.9
    assert calibrator.chance(2, 1, 3, prior=0.9) == 0.9


def test_a_source_that_stops_being_right_fades() -> None:
    calibrator = Calibrator(memory=100)
    for _ in range(5000):
        calibrator.observe(1, 1, 0, accepted=True)
    for _ in range(500):
        calibrator.observe(1, 1, 0, accepted=False)
    assert calibrator.chance(1, 1, 0, prior=0.5) < 0.05


def test_every_child_of_an_accepted_node_is_an_observation() -> None:
    raw = TokenTree.from_lists([0, 1, 2, 3, 4], [-1, 0, 0, 1, 2], [1.0, 0.55, 0.35, 0.5, 0.3])
    calibrator = Calibrator(prior_weight=1)
    calibrator.learn(raw, 1, [1, 9])
    seen = {(row["depth"], row["bucket"]): row["acceptance"] for row in calibrator.table()}
    assert seen == {(1, 5): 1.0, (1, 3): 0.0, (2, 9): 0.0}, "node 4's parent was not accepted"
    assert calibrator.apply(raw, 1).validate(10).confidence.tolist() == pytest.approx(
        [1, 0.775, 0.175, 0.352, 0.15], abs=1e-2
    )


def test_counts_go_to_another_calibrator() -> None:
    calibrator, again = Calibrator(), Calibrator()
    for _ in range(9):
        calibrator.observe(3, 2, 1, accepted=True)
    again.recall(calibrator.cells())
    assert again.chance(3, 2, 1, 0.1) == calibrator.chance(3, 2, 1, 0.1) > 0.5
    again.recall(Calibrator().cells())
    assert again.table() == calibrator.table()


@pytest.mark.parametrize("cells", [[[1, 2, 3]], [[1, 1, 1, 5, 4]], [[1, 1, 1, -1, 4]], [1, 2, 3, 4, 5]])
def test_counts_that_cannot_be_are_refused(cells: list[list[float]]) -> None:
    with pytest.raises(ValueError):
        Calibrator().recall(np.asarray(cells, np.float64))

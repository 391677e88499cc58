"""TALON's experiments by replay: rounds are those that the target would have had."""

from __future__ import annotations

from pathlib import Path

from rich.progress import Progress

from benchmarks.report.records import Grown, GrownRound
from benchmarks.report.tree_plots import growth_figure
from benchmarks.simulate.growth import Doubt, PolicySetting, replay, settings, table
from benchmarks.simulate.known_answers import answer, record
from drafters.calibration import Calibrator
from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.policies import Talon
from drafters.heads.head_drafter import HeadDrafter
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.target import Target
from tests.drafters.conftest import _float32_heads, target, target_dir  # noqa: F401
from tests.drafters.heads.test_eagle import eagle3

PROMPT = [40, 41, 42, 40, 41, 42, 40, 41]


def test_a_replayed_answer_has_the_rounds_that_the_target_gives(
    tmp_path: Path,
    target_dir: Path,  # noqa: F811
    target: TargetWeights,  # noqa: F811
) -> None:
    model, head = Target.load(str(target_dir), "float32"), eagle3(tmp_path, target)
    sampling = SamplingParams(max_tokens=24)
    (known,) = record(model, head.feature_layers, {"one": [PROMPT]}, sampling, Progress(disable=True))
    setting = PolicySetting("N", "20", Talon(budget=20))
    true = list(answer(model, HeadDrafter(head, setting.policy), PROMPT, sampling, 20))
    assert known.tokens == [token for verdict in true for token in verdict.tokens]
    rounds = replay(head, setting, [known]).rounds
    assert [(r.nodes, r.emitted) for r in rounds] == [(len(v.tree), len(v.tokens)) for v in true[1:]]


def test_an_overconfident_head_is_surer_the_deeper_and_calibration_learns_what_it_is_worth() -> None:
    doubt, tree = Doubt(0.5, None), TokenTree.from_lists([1, 2, 3], [-1, 0, 1], [1.0, 0.5, 0.25])
    assert doubt.candidates(0, -1, 1, ([2], [0.5])) == ([2], [0.5])
    (deeper,) = doubt.candidates(1, 0, 2, ([3], [0.5]))[1]
    assert deeper > 0.6
    calibrator = Calibrator()
    for _ in range(200):
        calibrated = Doubt(0.5, calibrator)
        calibrated.candidates(0, -1, 1, ([2], [0.5]))
        calibrated.candidates(1, 0, 2, ([3], [0.5]))
        calibrated.learn(tree, [0, 1], [2, 9])
    assert calibrated.candidates(1, 0, 2, ([3], [0.5]))[1][0] < 0.1
    assert calibrated.candidates(0, -1, 1, ([2], [0.5]))[1][0] > 0.9


def test_the_table_and_the_figure_hold_every_setting(tmp_path: Path) -> None:
    rounds = [GrownRound("gsm8k", 60, 8, 3, 2.5, 0.002, 5), GrownRound("qa", 60, 4, 2, 2.5, 0.002, 5)]
    grown = [Grown(s.group, s.value, rounds) for s in settings()]
    assert grown[0].mean("emitted") == 2.5 and grown[0].mean("emitted", "qa") == 2
    assert table(grown, [0.01, 0.01, 0.01, 0.02, 0.03, 0.05], 1024).row_count == len(grown)
    growth_figure(grown, {(g.group, g.value): 1.0 for g in grown}, 1024, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")

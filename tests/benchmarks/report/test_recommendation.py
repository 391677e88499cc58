"""What `talon bench --quick` ends with."""

from __future__ import annotations

import msgspec

from benchmarks.report.figures import Row
from benchmarks.report.recommendation import activations_told, recommendation
from tests.benchmarks.report.test_figures import row

OPTIONS = ["--set", "model=FILE.gguf", "--set", "activations=int8"]


def answers(**speed_ups: list[float]) -> list[Row]:
    """Return the rows of each method's answers, in the order of the prompts."""
    rows = []
    for method, some in {"none": [1.0] * 6, **speed_ups}.items():
        rows += [row(method.replace("_", "-"), str(number), 1 / ratio) for number, ratio in enumerate(some)]
    return rows


def test_the_fastest_method_is_recommended_with_the_line_that_serves_it() -> None:
    told = recommendation(answers(talon_pld=[1.2] * 6, talon_suffix=[1.5] * 6), OPTIONS)
    assert told.startswith("Turn speculation on with suffix, 1.50x plain decoding (95%: 1.50 to 1.50), 6 prompts")
    assert told.splitlines()[1] == "talon serve --set model=FILE.gguf --set activations=int8 --method suffix"


def test_a_method_that_may_be_slower_is_not_recommended() -> None:
    told = recommendation(answers(talon_suffix=[0.7, 0.8, 0.9, 1.6, 1.7, 1.8], talon_pld=[1.1] * 6), [])
    assert "Turn speculation on with pld" in told and told.endswith("--method pld")
    told = recommendation(answers(talon_suffix=[0.7, 0.8, 0.9, 1.6, 1.7, 1.8]), [])
    assert "Leave speculation off" in told and "suffix, 1.25x" in told and told.endswith("--method none")


def test_methods_as_published_are_not_recommended() -> None:
    assert "Leave speculation off" in recommendation(answers(eagle3=[2.0] * 6), [])


def test_a_path_with_spaces_can_be_pasted() -> None:
    assert recommendation(answers(), ["--set", "model=my model.gguf"]).endswith(
        "--set 'model=my model.gguf' --method none"
    )


def test_both_kinds_of_activations_are_told_with_their_speeds() -> None:
    chosen, others = (
        [msgspec.structs.replace(one, activations=kind) for one in answers(talon_suffix=[1.5] * 6)]
        for kind in ("bfloat16", "int8")
    )
    told = activations_told(chosen, others[:6])
    assert told.startswith("activations=auto is bfloat16 here: suffix ") and "; to take that" in told
    assert "int8: plain" in told and "--set activations=int8: " in told

"""`talon check`: which settings are compared, what counts as different, and how an ended check goes on."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.inputs.questions import AskedQuestion, Question
from benchmarks.measure.check import Check, CheckLog, Grid, run_check
from benchmarks.measure.equality import Comparison, Setting, errors, table, verdict
from engine.api import Engine
from engine.config import Config, load
from engine.core.errors import ConfigError, RequestError
from engine.core.params import SamplingParams
from engine.weights.tokenizer import load_tokenizer

SAMPLING = SamplingParams(max_tokens=8, seed=3)
ASKED = [AskedQuestion("count", Question("7", "test", ["unseen"]), [5, 6, 7])]
PLD = Setting("pld", "sequential", "inproc", 1)


@pytest.fixture
def config(tiny: str) -> Config:
    return load({"model": tiny}, {"transport": "inproc", "verifier.threads": 1})


def test_plain_decoding_counts_in_one_mode() -> None:
    grid = Grid(["none", "pld"], ["sequential", "async"], ["inproc", "ipc"], [1, 2], [0.0])
    settings = grid.settings()
    assert len(settings) == len(set(settings)) == 4 + 8
    assert {one.mode for one in settings if one.method == "none"} == {"sequential"}


async def test_every_setting_answers_everything_at_every_temperature(config: Config, questions: Path) -> None:
    grid = Grid(["none", "pld"], ["sequential", "async"], ["inproc"], [1], [0.0, 1.0], at_once=3)
    done = await run_check(config, grid, [questions], None, SAMPLING, None, Console(quiet=True))
    ours = [one for one in done if one.reference == "none"]
    assert {(one.setting, one.temperature) for one in ours} == {(s, t) for s in grid.settings() for t in (0.0, 1.0)}
    assert all((one.equal, one.different, one.tie) == (3, [], 0.0) for one in ours)
    (stock,) = (one for one in done if one.reference == "transformers")
    assert (stock.temperature, stock.equal) == (0.0, 3)


async def test_spread_out_every_question_is_answered_once_by_a_method_and_every_setting_answers_some(
    config: Config, questions: Path
) -> None:
    grid = Grid(["none", "pld"], ["sequential", "async"], ["inproc"], [1], [0.0, 1.0], spread=True)
    done = await run_check(config, grid, [questions], None, SAMPLING, None, Console(quiet=True))
    ours = [one for one in done if one.reference == "none"]
    assert [(one.setting.method, one.setting.mode, one.temperature, one.equal) for one in ours] == [
        ("none", "sequential", 0.0, 3),
        ("none", "sequential", 1.0, 3),
        ("pld", "sequential", 0.0, 2),
        ("pld", "sequential", 1.0, 2),
        ("pld", "async", 0.0, 1),
        ("pld", "async", 1.0, 1),
    ]


def test_spread_out_a_question_is_answered_under_one_setting() -> None:
    grid = Grid(["pld"], ["sequential", "async"], ["inproc", "ipc"], [1, 2], [0.0], spread=True)
    parts = [[*grid.questions_of(setting, 20)] for setting in grid.settings()]
    assert sorted(itertools.chain(*parts)) == [*range(20)]
    assert {len(part) for part in parts} == {2, 3}


@pytest.mark.parametrize(("dtype", "tie"), [("bfloat16", 5.0), ("float32", 1e-4)])
async def test_a_tie_with_float32_is_what_rounding_to_the_targets_type_turns(
    config: Config, questions: Path, dtype: str, tie: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps = iter([0.2, 5.0, 0.3])
    monkeypatch.setattr("benchmarks.measure.check.most_turned", lambda *_: next(gaps))
    grid = Grid(["none"], ["sequential"], ["inproc"], [1], [0.0])
    done = await run_check(load(config, {"dtype": dtype}), grid, [questions], None, SAMPLING, None, Console(quiet=True))
    (stock,) = (one for one in done if one.reference == "transformers")
    assert stock.tie == tie


async def test_a_text_that_differs_is_an_error_with_its_place_and_both_tokens(config: Config) -> None:
    check = Check(config, load_tokenizer(config.model), ASKED, SAMPLING, Grid(["pld"], [], [], [], [0.0]))
    compared = check._compared(Comparison(PLD, 0.0, "none", tie=0.0), {0: [5, 6, 9]}, {0: [5, 6, 8, 4]})
    assert compared.equal == 0
    (line,) = errors([compared])
    assert line.startswith("pld, sequential, inproc, 1 threads, T = 0, count 7: token 2 is 9 instead of 8 (")
    assert table([compared]).rows[0][-4:] == ["0", "-", "1", "-"]
    assert verdict([compared]) == "0 of 1 texts are equal; 1 are wrong"


async def test_where_ties_are_allowed_only_a_wide_gap_is_an_error(config: Config) -> None:
    check = Check(config, load_tokenizer(config.model), ASKED, SAMPLING, Grid(["pld"], [], [], [], [0.0]))
    for tie, wrong in (100.0, 0), (1e-9, 1):
        compared = check._compared(Comparison(PLD, 0.0, "none", tie), {0: [5, 6, 9]}, {0: [5, 6, 8]})
        assert (len(compared.different), len(errors([compared]))) == (1, wrong)
        assert verdict([compared]).endswith(f"; {wrong} are wrong") and ("1 differ" in verdict([compared])) == (
            not wrong
        )


def test_the_table_fits_a_terminal_whole() -> None:
    setting = Setting("talon-suffix", "sequential", "inproc", 2)
    printed = Console(file=io.StringIO(), width=80)
    printed.print(table([Comparison(setting, 0.75, "transformers", 0.1, 120)]).rich())
    shown = printed.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert all(cell in shown.split() for cell in ("talon-suffix", "sequential", "inproc", "2", "hf", "0.75", "120"))


async def test_a_check_goes_on_where_it_was_ended(config: Config, questions: Path, tmp_path: Path) -> None:
    log, quiet = tmp_path / "check.jsonl", Console(quiet=True)
    first = Grid(["pld"], ["sequential"], ["inproc"], [1], [0.0])
    both = Grid(["pld", "suffix"], ["sequential"], ["inproc"], [1], [0.0])
    done = await run_check(config, first, [questions], None, SAMPLING, log, quiet)
    lines = log.read_text().splitlines()
    more = await run_check(config, both, [questions], None, SAMPLING, log, quiet)
    assert [one.setting.method for one in more] == [*(one.setting.method for one in done), "suffix"]
    assert log.read_text().splitlines()[: len(lines)] == lines
    assert CheckLog(log, json.loads(lines[0])).done == more


async def test_a_log_of_other_questions_is_refused_and_of_other_settings_where_these_share_them(
    config: Config, questions: Path, tmp_path: Path
) -> None:
    log, quiet = tmp_path / "check.jsonl", Console(quiet=True)
    one, two = (Grid(["pld"], modes, ["inproc"], [1], [1.0], 1, True) for modes in (["async"], ["async", "sequential"]))
    await run_check(config, one, [questions], 2, SAMPLING, log, quiet)
    with pytest.raises(ConfigError, match=r"check.jsonl: cannot be gone on with .*spread"):
        await run_check(config, two, [questions], 2, SAMPLING, log, quiet)
    with pytest.raises(ConfigError, match=r"check.jsonl: cannot be gone on with .*other questions.*; name another"):
        await run_check(config, one, [questions], 3, SAMPLING, log, quiet)


MANY = Grid(["pld"], ["async", "sequential"], ["inproc", "ipc"], [1], [1.0], 1, True)


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        (Grid(["pld", "datastore"], ["sequential"], ["inproc"], [1], [0.0]), r"^drafter\.datastore"),
        (MANY, "--spread: 3 questions for 4 settings of a method; give more questions"),
    ],
)
async def test_methods_that_cannot_draft_and_too_few_questions_are_refused_before_anything_is_answered(
    grid: Grid, told: str, config: Config, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Engine, "generate")
    with pytest.raises(ConfigError, match=told):
        await run_check(config, grid, [questions], None, SAMPLING, None, Console(quiet=True))


async def test_a_prompt_that_is_too_long_is_refused_by_its_question_before_any_is_answered(
    config: Config, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with questions.open("a") as file:
        file.write(json.dumps({"question_id": "long", "turns": ["x" * 600]}) + "\n")
    monkeypatch.delattr(Engine, "generate")
    grid = Grid(["pld"], ["sequential"], ["inproc"], [1], [0.0])
    with pytest.raises(RequestError, match=r"^question long of questions: prompt: its 602 tokens leave no room"):
        await run_check(config, grid, [questions], None, SAMPLING, None, Console(quiet=True))


@pytest.mark.parametrize("content", ["hello\n", '{"model":\n', "\n"])
def test_a_file_that_is_no_log_is_refused_and_left_alone(content: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"notes.txt: cannot be gone on with"):
        CheckLog(file, {"model": "m"})
    assert file.read_text() == content

"""The load harness on a tiny model; times are made up, since those of a busy machine say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from benchmarks.inputs.questions import AskedQuestion, Question
from benchmarks.measure.load import _parts, _slices, arrivals, run_load, settings_of
from benchmarks.measure.plan import MeasurementPlan
from benchmarks.report.load_figures import (
    LoadRow,
    arrival_table,
    level_table,
    levels,
    ratios,
    throughput,
    tokens_per_second,
)
from benchmarks.report.progress import progress_bar
from engine.config import load
from engine.core.errors import ConfigError, RequestError
from engine.core.params import SamplingParams
from tests.command import talon

SAMPLING = SamplingParams(max_tokens=12)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of five questions."""
    made = []
    for suite in ("count", "sing"):
        path = tmp_path / f"{suite}.jsonl"
        rows = [{"question_id": i, "category": suite, "turns": [f"{suite} {i} and {i} and {i}"]} for i in range(5)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made.append(path)
    return made


def row(
    asked_s: float, emitted: list[tuple[float, int]], method: str = "none", level: int = 2, **more: object
) -> LoadRow:
    made = LoadRow("count", "1", method, level, None, 0, asked_s, emitted, True, True)
    return msgspec.structs.replace(made, **more)


async def test_every_request_is_asked_and_has_the_text_that_it_has_alone(
    tiny: str, files: list[Path], tmp_path: Path
) -> None:
    config = load({"model": tiny}, {"transport": "inproc", "verifier.threads": 1})
    plan = MeasurementPlan(config, ["pld"], files, tmp_path, [SAMPLING], repeats=2)
    rows = await run_load(plan, [1, 2], [0.5], Console(quiet=True))
    assert {row.method for row in rows} == {"none", "pld"}
    assert all(row.output_equal and row.exact and row.tokens <= 12 for row in rows)
    assert all(row.busy is not None and 0 < row.busy <= 1 for row in rows if row.tokens > 1)
    counts = {level: sum(row.concurrency == level for row in rows) for level in (1, 2, 16)}
    assert counts == {1: 2 * 2 * 4, 2: 2 * 2 * 8, 16: 2 * 2 * 64}
    assert sum(row.arrivals == 0.5 for row in rows) == 2 * 2 * 64
    assert {row.suite for row in rows if row.concurrency == 1} == {"count", "sing"}
    written = [msgspec.json.decode(line, type=LoadRow) for line in (tmp_path / "load.jsonl").read_text().splitlines()]
    assert written == rows


async def test_a_text_that_differs_is_seen(
    tiny: str, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(bench: object, engine: object, one: object) -> list[int]:
        return [1, 2, 3]

    monkeypatch.setattr("benchmarks.measure.load._Bench.text", wrong)
    config = load({"model": tiny}, {"transport": "inproc", "verifier.threads": 1})
    rows = await run_load(
        MeasurementPlan(config, ["none"], files, tmp_path, [SAMPLING], 1), [2], [], Console(quiet=True)
    )
    assert rows and not any(row.output_equal for row in rows)


async def test_a_prompt_that_is_too_long_is_refused_by_its_question_before_any_is_asked(
    tiny: str, files: list[Path], tmp_path: Path
) -> None:
    with files[0].open("a") as file:
        file.write(json.dumps({"question_id": "long", "turns": ["x" * 600]}) + "\n")
    config = load({"model": tiny}, {"transport": "inproc", "verifier.threads": 1})
    with pytest.raises(RequestError, match=r"^question long of count: prompt: its 602 tokens leave no room"):
        await run_load(MeasurementPlan(config, [], files, tmp_path, [SAMPLING]), [4], [], Console(quiet=True))


async def test_progress_ends_at_its_total_however_many_repeats_the_minutes_allow(
    tiny: str, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = progress_bar(Console(quiet=True))
    monkeypatch.setattr("benchmarks.measure.load.progress_bar", lambda _: bars)
    config = load({"model": tiny}, {"transport": "inproc", "verifier.threads": 1})
    plan = MeasurementPlan(config, ["none"], files, tmp_path, [SAMPLING], 1, repeats=3, minutes=0)
    rows = await run_load(plan, [2], [], bars.console)
    (task,) = bars.tasks
    assert len(rows) == 8  # one repeat
    assert task.completed == task.total == 2 + 8


def test_tokens_a_second_are_those_of_the_time_in_which_every_place_is_taken() -> None:
    rows = [row(0, [(1, 5), (2, 5)]), row(0, [(1, 5), (3, 5)]), row(2, [(4, 5), (8, 100)])]
    assert tokens_per_second(rows) == 20 / 3  # at 3 s a place is left empty


def test_a_round_of_several_tokens_is_one_pause() -> None:
    assert row(1, [(2, 1), (2.5, 7), (4, 1)]).pauses_s == [0.5, 1.5]
    assert row(1, [(2, 1)]).first_token_s == 1


def test_a_level_is_as_busy_as_its_answers_in_the_mean_and_other_servers_do_not_say() -> None:
    rows = [row(0, [(1, 2), (2, 2)], busy=busy) for busy in (0.9, 0.8)]
    plain, other = levels([*rows, row(0, [(1, 1)], "other")])
    assert plain.busy == pytest.approx(0.85) and other.busy is None
    assert [line[6] for line in level_table([plain, other]).rows] == ["85%", "-"]


def test_goodput_leaves_out_answers_that_came_too_late() -> None:
    good, late = row(0, [(0.5, 1), (1, 9)]), row(0, [(5, 10)])
    assert throughput([good, late]) == 4 and throughput([good, late], good=True) == 2


def test_speed_ups_are_medians_over_repeats_at_the_same_level() -> None:
    rows = []
    for repeat, (plain, drafted) in enumerate([(10, 10), (20, 60), (10, 20)]):
        rows.append(row(0, [(1, plain)], level=1, repeat=repeat))
        rows.append(row(0, [(1, drafted)], "pld", level=1, repeat=repeat))
        rows.append(row(0, [(1, 3 * plain)], level=4, repeat=repeat))
    one, drafted, four = levels(rows)
    assert (one.method, one.over_plain, one.over_one) == ("none", 1, 1)
    assert (drafted.method, drafted.over_plain) == ("pld", 2)
    assert (four.concurrency, four.over_plain, four.over_one) == (4, 1, 3)


def test_tables_fit_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(0, [(12.345, 1), (14, 3999)], "talon-tree", level=64), row(0, [(12, 1), (14, 3999)], level=64)]
    rows += [msgspec.structs.replace(one, concurrency=None, arrivals=0.85) for one in rows]
    Console(width=80).print(level_table(levels(rows)).rich())
    Console(width=80).print(arrival_table(rows).rich())
    printed = capsys.readouterr().out
    assert printed.count("talon-tree") == 2 and "…" not in printed
    assert "12345/12345" in printed and "same text" in printed


def test_no_question_is_asked_twice_before_all_were() -> None:
    mixed = [AskedQuestion("count", Question(str(i), "count", [""]), [i]) for i in range(10)]
    first, second, third = _slices(mixed, [4, 4, 4])
    assert len({one.prompt[0] for one in first + second}) == 8
    assert [one.prompt[0] for one in third] == [8, 9, 0, 1]


def test_a_share_of_one_is_not_one_request_at_once() -> None:
    assert len(_parts([1, 16], [1.0], 1)) == 3


def test_arrivals_come_as_often_as_asked_for_and_the_same_for_every_method() -> None:
    rows = [row(0, [(4, 10)], level=16)]  # a quarter of a request a second
    times = arrivals(rows, 0, 0.5, 4000)
    assert times == arrivals(rows, 0, 0.5, 4000) != arrivals(rows, 0, 0.8, 4000)
    assert 4000 / times[-1] == pytest.approx(0.125, rel=0.1)


def test_methods_run_as_they_are_served_and_who_answers_one_at_a_time_is_refused() -> None:
    config = load({"model": "x"}, {})
    assert settings_of("suffix", config).verifier.cut
    assert settings_of("eagle2", config).drafter.growth.policy == "dynamic"
    with pytest.raises(ConfigError, match="one request at a time"):
        settings_of("hf", config)


@pytest.mark.parametrize("wrong", [["--concurrency", "1,x"], ["--concurrency", "0"], ["--arrivals", "-1"]])
def test_wrong_numbers_are_one_line(wrong: list[str], files: list[Path], tmp_path: Path) -> None:
    done = talon("bench", "--questions", str(files[0]), "--out", str(tmp_path), *wrong)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"talon: {wrong[0]} {wrong[1]}") and done.stderr.count("\n") == 1


def test_the_command_prints_a_table_and_draws_a_picture(tiny: str, files: list[Path], tmp_path: Path) -> None:
    options = ["--concurrency", "1,2", "--methods", "none,suffix", "--limit", "2", "--max-tokens", "8"]
    asked = [part for file in files for part in ("--questions", str(file))]
    done = talon(
        "bench", *asked, *options, "--out", str(tmp_path), "--set", f"model={tiny}", "--set", "transport=inproc"
    )
    assert done.exit_code == 0, done.stderr
    assert "Requests at once" in done.stdout and "suffix" in done.stdout
    assert (tmp_path / "concurrency.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_was_interrupted_before_plain_decoding_is_left_out() -> None:
    rows = [row(0, [(1, 10)], level=1), row(0, [(1, 20)], "pld", level=1), row(0, [(1, 20)], "pld", level=2)]
    assert [(line.concurrency, line.method) for line in levels(rows)] == [(1, "none"), (1, "pld")]
    assert [level for _, level, _ in ratios(rows)] == ["1 at once"]

"""`talon tune` from end to end, stopped at every stage, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from benchmarks.report.figures import Row
from benchmarks.tuning import answering, journal, measuring
from benchmarks.tuning import tune as tune_module
from benchmarks.tuning.journal import Progressed, TuningJournal, begin_again, worked_on_alone
from benchmarks.tuning.measuring import NEW, OLD, Gain
from drafters.training.recipe import Recipe
from drafters.training.run import train
from drafters.training.trainer import Trainer
from engine import Engine, SamplingParams
from engine.config import load
from engine.core.errors import ModelError
from engine.files.answer_rows import AnswerRow
from engine.files.removal import removed
from engine.weights.installed_head import install, made_for
from engine.weights.resolve import with_own
from tests.benchmarks.tuning.conftest import PROMPTS, RECIPE, Tune, text_from
from tests.benchmarks.tuning.test_measuring import rows_of
from tests.command import talon
from tests.engine.weights.test_installed_head import head_in


def run_of(home: Path) -> Path:
    """Return the folder of the one tuning."""
    [run] = (home / "tuning").glob("*/run-*")
    return run


def told(done: Any) -> str:
    """Return the one line with which the command refused."""
    assert done.exit_code == 2, done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("talon: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def head_of(model: str) -> str | None:
    return with_own(load({"model": model})).drafter.weights("block")


def train_steps(monkeypatch: pytest.MonkeyPatch, recipe: Path, steps: int, evaluate_every: int) -> None:
    """Let steps bound the training, since what a time is enough for depends on the machine."""
    recipe.write_text(json.dumps(RECIPE | {"evaluate_every": evaluate_every}))
    monkeypatch.setattr(
        tune_module, "train", lambda *given, **named: train(*given, **named | {"minutes": None, "steps": steps})
    )


def count_rounds_as_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an answer take as long as it has rounds."""
    usual = measuring.row_of

    def row_of(*given: Any) -> Row:
        row = usual(*given)
        return msgspec.structs.replace(row, seconds=0.025 * (row.rounds or 0))

    monkeypatch.setattr(measuring, "row_of", row_of)


async def test_a_head_that_pays_is_installed_and_the_engine_finds_it(
    tune: Tune, recipe: Path, walker: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_steps(monkeypatch, recipe, 120, 60)
    count_rounds_as_time(monkeypatch)
    done = await asyncio.to_thread(tune, "--hours", "1", latency_ms=25)  # for all answers: a head learns little of few
    assert done.exit_code == 0, done.output
    first, line = done.stdout.splitlines()[-2:]
    assert first.startswith("The head pays: with it answers come ") and " as fast as " in first
    sets = f"--set model={walker} --set transport=inproc --set verifier.simulated_latency_ms=25"
    assert line == f"talon serve {sets} --method hybrid"
    run = run_of(home)
    assert (run / "curve.png").stat().st_size > 10_000
    assert not [*run.glob("features-*")] and not (run / "head" / "training").exists()
    copied = tmp_path / "elsewhere"  # whatever the model is called
    shutil.copytree(walker, copied)
    assert head_of(str(copied)) is not None
    settings = {"model": str(copied), "transport": "inproc"}
    texts, tokens_a_round = [], []
    for method in ("none", "block"):
        async with await Engine.start(settings, method=method, **{"verifier.cut": False}) as engine:
            answers = [
                await engine.generate(text_from(seed, 30)[:5], SamplingParams(max_tokens=20)) for seed in range(9, 17)
            ]
            texts.append([answer.token_ids for answer in answers])
            tokens_a_round.append(statistics.mean(answer.metrics.mean_accepted_tokens for answer in answers))
    assert texts[0] == texts[1] and {len(text) for text in texts[0]} == {20}
    assert tokens_a_round[1] > 2.5


class Killed(BaseException):
    """In the place of a kill: nothing of ours catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, reason: str = "") -> None:
    """Let a function end everything at its call of that number."""
    usual, calls = getattr(owner, name), []

    def dies(*arguments: Any, **named: Any) -> Any:
        calls.append(0)
        if len(calls) == call:
            raise Killed(reason)
        return usual(*arguments, **named)

    monkeypatch.setattr(owner, name, dies)


class Stage(NamedTuple):
    owner: object
    name: str
    call: int


STAGES = {
    "answering": Stage(AnswerRow, "of", 9),
    "training": Stage(Trainer, "train_step", 6),
    "drawing": Stage(tune_module, "draw", 1),
    "measuring": Stage(measuring, "compared", 10),
    "deciding": Stage(TuningJournal, "save", 1),
    "installing": Stage(tune_module, "install", 1),
    "recording": Stage(TuningJournal, "save", 1),  # that it was installed
    "clearing": Stage(TuningJournal, "forget_features", 1),
}


def test_a_tuning_that_is_stopped_in_every_stage_goes_on_each_time(
    tune: Tune, recipe: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_steps(monkeypatch, recipe, 12, 4)
    monkeypatch.setattr(Gain, "pays", True)  # however little it was trained
    answered, steps = [], []
    for name, stage in STAGES.items():
        with monkeypatch.context() as patch, pytest.raises(Killed, match=name):
            kill_at(patch, *stage, reason=name)
            if name == "training":
                patch.setattr(tune_module, "_KEPT_MINUTES", 0.0)
            tune()
        answers = next((home / "tuning").glob("*/answers-*")).read_bytes().splitlines()
        answered.append([json.loads(line)["prompt"] for line in answers])
        if (curve := run_of(home) / "head" / "training" / "curve.json").is_file():
            steps.append([point[0] for point in json.loads(curve.read_bytes())])
    assert 8 <= len(answered[0]) < len(answered[1]) and len(set(answered[-1])) == len(answered[-1])
    assert answered[1] == answered[-1]
    assert steps[0] == [4] and steps[-1] == [4, 8, 12]
    rows = [msgspec.json.decode(line, type=Row) for line in (run_of(home) / "results.jsonl").read_bytes().splitlines()]
    asked = [(row.question_id, row.method) for row in rows]
    assert len(asked) == len(set(asked))
    done = tune()
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].endswith("--method hybrid")
    monkeypatch.setattr(tune_module, "train", None)  # not called again
    again = tune()
    assert again.stdout.splitlines()[-2:] == done.stdout.splitlines()[-2:] and "--again" in again.stderr


def test_a_head_that_does_not_pay_is_not_installed_and_the_old_one_goes_on(
    tune: Tune, walker: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tune_module._known(load({"model": walker}), Path(walker))
    install(head_in(tmp_path / "old", "old"), own.tuned, "walker.gguf", "of other weights")

    async def measured(configs: dict[str, Any], *rest: Any) -> list[Row]:
        assert list(configs) == ["none", "suffix", NEW, OLD]
        assert configs[OLD].drafter.weights("block") == str(own.tuned / "block")
        return rows_of({"none": 4.0, "suffix": 2.0, NEW: 1.6, OLD: 1.5})

    monkeypatch.setattr(tune_module, "measure", measured)
    done = tune("--hours", "0.001")
    assert done.exit_code == 0, done.output
    assert "made for another version of this model (walker.gguf): it goes on until a better one is there" in done.stderr
    first, line = done.stdout.splitlines()[-2:]
    assert first == (
        "The head is not installed, since it does not surely pay: with it answers come 0.94x as fast as hybrid, old "
        "head (95%: 0.94 to 0.94), 2.50x plain decoding, 8 prompts."
    )
    assert line.endswith("--method hybrid")
    assert (own.tuned / "block" / "config.json").read_text() == "old"


def begun(tune: Tune, home: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    """Let a tuning be killed before it does anything; return its folder."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, tune_module, "made_for", 1)
        tune(*options)
    return run_of(home)


def test_a_head_that_paid_and_was_removed_is_installed_again_and_what_a_kill_left_is_cleared(
    tune: Tune, walker: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tune, home, monkeypatch)
    head_in(run / "head")
    (run / "features-left").mkdir()
    done = Progressed(trained=True, outcome="The head pays.", method="hybrid", pays=True, installed=True)
    (run / "journal.json").write_bytes(msgspec.json.encode(done))
    assert head_of(walker) is None
    assert tune().stdout.splitlines()[0] == "The head pays." and head_of(walker) is not None
    assert not (run / "features-left").exists()
    assert (home / "tuning").stat().st_mode & 0o777 == 0o700  # what was asked cannot be read by others
    monkeypatch.setattr(tune_module, "install", None)  # not called again
    assert tune().exit_code == 0


def test_starting_over_removes_what_was_measured_and_told_before_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_in(tmp_path / "head")
    for name in ("journal.json", "results.jsonl", "data.jsonl"):
        (tmp_path / name).write_text("")
    order: list[str] = []
    monkeypatch.setattr(journal, "removed", lambda path: (order.append(path.name), removed(path))[1])
    begin_again(tmp_path)
    assert order[:2] == ["results.jsonl", "journal.json"] and not [*tmp_path.iterdir()]


def test_the_head_so_far_is_compared_for_a_model_of_the_hub_too_and_no_answers_are_kept(
    walker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tune_module._known(load({"model": walker}), Path(walker))
    install(head_in(tmp_path / "head"), own.tuned, "org/name", "one")
    monkeypatch.setattr(measuring, "resolve", {"org/name": walker}.__getitem__)
    config = load({"model": "org/name", "verifier": {"cache": str(tmp_path)}})
    found = measuring.contestants(config, tmp_path / "new")
    assert found[OLD].drafter.weights("block") == str(own.tuned / "block")
    assert {one.verifier.cache for one in found.values()} == {None}


def test_what_was_measured_beside_another_head_in_use_is_measured_anew(
    tune: Tune, walker: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module, "draw", lambda *given: None)
    monkeypatch.setattr(tune_module, "train", lambda method, target, data, out, *rest, **named: head_in(out))
    own, found = tune_module._known(load({"model": walker}), Path(walker)), []

    def killed(configs: Any, prompts: Any, sampling: Any, minutes: float, file: Path, console: Any) -> list[Row]:
        found.append(file.is_file())
        file.write_text("rows")
        raise Killed

    monkeypatch.setattr(tune_module, "measure", killed)
    for head in (None, None, "one", "one", "two"):
        if head is not None and not (tmp_path / head).exists():
            install(head_in(tmp_path / head), own.tuned, "walker", head)
        with pytest.raises(Killed):
            tune()
    assert found == [False, True, False, True, False]


@pytest.mark.parametrize(("pays", "added"), [(True, " --set drafter.path=auto --set drafter.head=auto"), (False, "")])
def test_the_line_to_serve_with_finds_the_head_that_pays_whatever_the_configuration_names(
    pays: bool, added: str, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Progressed(outcome="told", method="hybrid", pays=pays)
    monkeypatch.setattr(tune_module.Tuning, "work", lambda self: done)
    line = tune("--set", "drafter.path=/mine", "--set", "drafter.head=eagle3").stdout.splitlines()[-1]
    assert line.endswith(f"--set drafter.path=/mine --set drafter.head=eagle3{added} --method hybrid")


def test_a_newer_head_takes_the_place_of_the_old_one_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = tmp_path / "heads"
    for number in ("1", "2"):
        head_in(tmp_path / number, number)
    assert made_for(tuned) is None
    place = install(tmp_path / "1", tuned, "model", "one")
    assert place.stat().st_mode & 0o777 == 0o755  # by whoever serves
    for name, call in (("symlink_to", 1), ("replace", 5)):  # four files are replaced before the link is
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, Path, name, call)
            install(tmp_path / "2", tuned, "model", "two")
        assert (place / "model.safetensors").read_text() == "1" and made_for(tuned) == ("model", "one")
    install(tmp_path / "2", tuned, "model", "two")
    assert (place / "model.safetensors").read_text() == "2" and made_for(tuned) == ("model", "two")
    assert len([*tuned.iterdir()]) == 2  # the link and its folder


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"text": "w5"}], 'line 1 is not a JSON object with a "prompt"'),
        ([{"prompt": "w5", "messages": [{"role": "user", "content": "w5"}]}], "needs a prompt or messages"),
        ([{"messages": [{"role": "user"}]}], "prompt 1 cannot be asked"),
        ([{"prompt": "w5 " * 40}], "0 of its 1 prompts have at most 12 tokens"),
        ([{"prompt": f"w{5 + n}"} for n in range(31)], "31 of its 31 prompts have at most 12 tokens: give at least 32"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_and_too_few_prompts_are_refused(
    tune: Tune, prompts: Path, rows: list[dict[str, Any]], reason: str
) -> None:
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert reason in told(tune())


def test_a_model_that_does_not_run_lean_is_refused(tune: Tune, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(tune_module, "not_lean", lambda folder: "its norms are unknown")
    assert "does not run lean (its norms are unknown): no head is tuned for it" in told(tune())
    assert not (home / "tuning").exists()


def test_a_disk_without_room_is_told_before_anything_is_answered_and_the_old_head_stays(
    tune: Tune, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_module.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 5_000_000}))
    assert "tune: needs 200 MB in" in (line := told(tune())) and "5 MB are left: make room" in line
    assert not [*(home / "tuning").glob("*/answers-*")]


def test_a_home_that_cannot_be_written_is_told(tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TALON_HOME", str(tmp_path / "file" / "home"))
    assert "cannot be written (Not a directory): set TALON_HOME" in told(tune())


def test_a_new_head_that_cannot_be_started_is_not_measured(
    tune: Tune, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(method: str, target: str, data: Path, out: Path, *rest: Any, **named: Any) -> None:
        out.mkdir()
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(tune_module, "train", broken)
    monkeypatch.setattr(tune_module, "draw", lambda *given: None)
    assert "head: cannot be started, as told above" in told(done := tune())
    assert "left out: hybrid, new head: drafter.path=" in " ".join(done.stderr.split())
    assert not (home / "heads").exists()


def test_what_training_refuses_is_told_with_the_options_of_this_command(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reason, fix in (
        ("out=F: cannot be written: make room and run again with --resume", "make room and run the same command again"),
        ("checkpoint=F: cannot be read (short): start again without --resume", "(short): add --again to start over"),
        ("data=F: holds 0 prompts: give at least two", "give at least two"),
    ):

        def refused(*given: Any, reason: str = reason, **named: Any) -> None:
            raise ModelError(reason)

        monkeypatch.setattr(tune_module, "train", refused)
        line = told(tune())
        assert line.endswith(fix) and "--resume" not in line


def test_a_second_tuning_waits_its_turn_and_a_journal_that_is_damaged_is_named_and_begun_again(
    tune: Tune, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tune, home, monkeypatch)
    with worked_on_alone(run.parent):  # whatever is set for the other
        assert "another process works in" in told(tune())
    (run / "journal.json").write_text("{")
    assert "journal.json: cannot be read" in told(tune())
    assert begun(tune, home, monkeypatch, "--again") == run
    assert not (run / "journal.json").exists()


def test_the_time_is_shared_and_what_answers_leave_is_for_training(
    tune: Tune, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at(monkeypatch, tune_module, "train", 1)
    with pytest.raises(Killed):
        tune("--hours", "1")
    done = msgspec.json.decode((run_of(home) / "journal.json").read_bytes(), type=Progressed)
    assert done.training_minutes == pytest.approx(60 * 0.85 - done.answering_s / 60) and done.answering_s > 0
    monkeypatch.setattr(answering, "Engine", None)  # which answers that are there do not need
    kill_at(monkeypatch, tune_module, "train", 1)
    with pytest.raises(Killed):
        tune("--hours", "1.1")
    others = [msgspec.json.decode(file.read_bytes(), type=Progressed) for file in (home / "tuning").glob("*/*/*.json")]
    assert sorted(one.training_minutes or 0 for one in others) == [done.training_minutes, pytest.approx(66 * 0.85)]


def test_prompts_are_answered_again_while_there_is_time_and_room_for_their_hidden_states(
    tune: Tune, recipe: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learnt(hours: str) -> list[dict[str, Any]]:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, tune_module, "train", 1)
            tune("--hours", hours)
        newest = max((home / "tuning").glob("*/run-*/data.jsonl"), key=lambda file: file.stat().st_mtime_ns)
        return [json.loads(line) for line in newest.read_bytes().splitlines()]

    recipe.write_text(json.dumps(RECIPE | {"answers_each": 3, "further_temperature": 5.0}))
    rows, asked = learnt("1"), PROMPTS - 8
    assert len(rows) == 3 * asked and len({(row["prompt"], *row["tokens"]) for row in rows}) == 3 * asked
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in rows[:asked]] * 3
    monkeypatch.setattr(answering, "Engine", None)  # which answers that are there do not need
    of_all = tune_module.Tuning._bytes_of
    monkeypatch.setattr(
        tune_module.Tuning, "_bytes_of", lambda self, some: of_all(self, some) * 1e9 ** (len(some) > asked)
    )
    assert learnt("1.1") == rows[:asked]


def test_further_answers_are_begun_in_their_own_share_of_the_time(
    tune: Tune, recipe: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "FURTHER", 0.0)
    recipe.write_text(json.dumps(RECIPE | {"answers_each": 2}))
    with pytest.raises(Killed):
        kill_at(monkeypatch, tune_module, "train", 1)
        tune("--hours", "1")
    sizes = sorted(file.stat().st_size for file in (home / "tuning").glob("*/answers-*"))
    assert len(sizes) == 2 and sizes[0] == 0 < sizes[1]


def test_the_recipe_of_the_command_is_valid_and_its_help_teaches(tune: Tune) -> None:
    assert Recipe.load(tune_module.TUNE_RECIPE, "block").answer_tokens > RECIPE["answer_tokens"]
    shown = talon("tune", "--help").stdout
    assert "goes on where it stopped" in " ".join(shown.split()) and "--prompts" in shown

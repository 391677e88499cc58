"""A lesson from end to end: killed at any point, without room, and of nobody else's texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from drafters.learning import lesson as lesson_module
from drafters.learning.learner import reply
from drafters.learning.lesson import learn
from drafters.training.answers import read_training_prompts
from drafters.training.recipe import Recipe
from drafters.training.run import CURVE
from drafters.training.trainer import Trainer
from engine.core.errors import ConfigError, ModelError
from engine.files.kept_texts import count_texts
from engine.files.lessons import LEAST_TEXTS, NOTHING_LEARNED, LessonOutcome
from engine.files.prompt_file import PromptRow
from engine.weights.installed_head import METHOD, MOST_LEARNED, learned_heads
from tests.benchmarks.tuning.conftest import RECIPE, text_from
from tests.drafters.learning.conftest import ANN, BEN, Lessons, remember


class Killed(BaseException):
    """In the place of a kill: nothing of ours catches it."""


def weights_of(lessons: Lessons, owner: str = ANN) -> bytes:
    return (learned_heads(lessons.learned.heads)[owner] / "model.safetensors").read_bytes()


def size_of(folder: Path) -> int:
    """Return what the files of a folder take on the disk."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def test_a_head_that_accepts_more_is_installed_and_nothing_else_stays(
    first_lesson: tuple[Lessons, LessonOutcome],
) -> None:
    lessons, outcome = first_lesson
    assert outcome.before == 1 and outcome.after > 1.3 and outcome.installed
    assert (outcome.texts, outcome.steps) == (60, 100) and 4 <= outcome.held_out <= 32
    assert [*learned_heads(lessons.learned.heads)] == [ANN]
    assert not lessons.learned.lesson(ANN).exists() and lessons.learned.due() == []


def test_the_next_lesson_begins_with_the_head_so_far_which_stays_where_it_is_if_that_accepts_no_more(
    taught: Lessons, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weights_of(taught)
    remember(taught.folder, "ann", range(1, 240, 4))
    assert taught.learned.due() == [ANN]
    given: dict[str, Any] = {}
    usual = lesson_module.train
    monkeypatch.setattr(lesson_module, "train", lambda *args, **named: given.update(named) or usual(*args, **named))
    monkeypatch.setattr(lesson_module, "LEAST_GAIN", 9.0)
    second = learn(taught.plan(general="nowhere"))
    assert given["start"] == taught.learned.heads / ANN / METHOD
    assert second.texts == 120 and second.after >= second.before > 1.2 and not second.installed
    assert weights_of(taught) == before and taught.learned.due() == []


def kill_in_training(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the training be killed before that step, and save before each."""
    usual, steps = Trainer.train_step, []

    def dies(trainer: Trainer) -> Any:
        steps.append(0)
        if len(steps) == step:
            raise Killed
        return usual(trainer)

    monkeypatch.setattr(lesson_module, "_KEPT_MINUTES", 0.0)
    monkeypatch.setattr(Trainer, "train_step", dies)


def test_a_lesson_killed_in_training_ends_with_the_head_of_one_that_was_not(
    lessons: Lessons, first_lesson: tuple[Lessons, LessonOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    spared, outcome = first_lesson
    with monkeypatch.context() as patched:
        kill_in_training(patched, 30)
        with pytest.raises(Killed):
            learn(lessons.plan())
    unfinished = lessons.learned.lesson(ANN) / "head" / "training" / "state.pt.1-2.tmp"
    unfinished.write_bytes(b"half of a checkpoint")
    remember(lessons.folder, "ann", [1, 2, 3])  # of the next lesson
    assert lessons.learned.due() == [ANN]
    steps: list[int] = []
    usual = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self: steps.append(self.step) or usual(self))
    assert learn(lessons.plan()) == outcome
    assert steps == [*range(29, 100)]
    assert weights_of(lessons) == weights_of(spared)


def test_a_lesson_killed_after_training_does_not_train_again(lessons: Lessons, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*given: object) -> None:
        raise Killed

    kept = type(lessons.learned)
    for owner, killed in ((lesson_module, "install"), (lesson_module, "forget_heads"), (kept, "end_lesson")):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(owner, killed, dies)
            learn(lessons.plan())
        monkeypatch.setattr(lesson_module, "train", None)  # from the second time on
    assert learn(lessons.plan()).installed
    assert [*learned_heads(lessons.learned.heads)] == [ANN] and not lessons.learned.lesson(ANN).exists()


def test_nothing_is_learned_from_texts_of_another_owner(lessons: Lessons, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(lessons.folder, "ben", range(2, 240, 4))
    told: list[PromptRow] = []

    def reads(*given: Any, **named: Any) -> Any:
        told.extend(msgspec.json.decode(line, type=PromptRow) for line in given[2].read_bytes().splitlines())
        raise Killed

    monkeypatch.setattr(lesson_module, "train", reads)
    with pytest.raises(Killed):
        learn(lessons.plan(BEN))
    assert sorted((row.prompt_tokens or []) + (row.tokens or []) for row in told) == sorted(
        text_from(start, 30) for start in range(2, 240, 4)
    )


GROWING = [range(count) for count in range(40, 400, 24)]
MANY_OF_WHICH_HALF_ARE_EVICTED = [range(start, start + 1000) for start in range(0, 3000, 500)]
FEW_OF_WHICH_A_THIRD_ARE_EVICTED = [range(start, start + 36) for start in range(0, 720, 12)]


@pytest.mark.parametrize("windows", [GROWING, MANY_OF_WHICH_HALF_ARE_EVICTED, FEW_OF_WHICH_A_THIRD_ARE_EVICTED])
def test_a_text_that_was_trained_on_is_never_held_out_later(windows: list[range], tmp_path: Path) -> None:
    file, trained, boundary, undone = tmp_path / "texts.jsonl", set[str](), None, 0
    for numbers in windows:
        recipe = Recipe.model_validate(RECIPE | {"prompts": 30})  # a cut after these would leave out those held out
        rows = [PromptRow(f"text {number}", [1, 2], [3] * 12) for number in numbers]
        if (split := lesson_module._split(rows, recipe.seed, boundary)) is None:
            undone += 1
            continue
        rows, held_out, boundary = split
        recipe = lesson_module._for_texts(recipe, len(rows), held_out)
        file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        names = [one.text for one in read_training_prompts(file, [0] * 4, recipe)]  # the last ones are held out
        assert len(names) == len(rows) and not trained & set(names[-recipe.held_out :])
        assert 4 <= held_out <= 32 and len(rows) > 0.8 * len(numbers)
        trained |= set(names[: -recipe.held_out])
    assert undone < len(windows) / 2


def test_a_lesson_with_too_few_texts_to_measure_on_is_left_until_there_are_more(
    lessons: Lessons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lesson_module, "train", None)
    boundary = lessons.learned.boundary(ANN)
    boundary.parent.mkdir(parents=True)
    boundary.write_text("fff")  # of a lesson with other texts
    assert learn(lessons.plan()) == NOTHING_LEARNED and boundary.read_text() == "fff"
    assert not lessons.learned.lesson(ANN).exists() and lessons.learned.due() == []
    remember(lessons.folder, "ann", range(1, 1 + 4 * LEAST_TEXTS, 4))
    assert lessons.learned.due() == [ANN]


def test_a_folder_that_is_too_small_is_told_with_the_option_to_change(lessons: Lessons) -> None:
    with pytest.raises(ConfigError, match=r"^--learn-gb: a lesson may take 1 MB, .*: give more$"):
        learn(lessons.plan(most_bytes=10**6))


def test_without_room_on_the_disk_nothing_is_written_and_the_old_head_stays(
    lessons: Lessons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lesson_module.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 9, 10**6))
    with pytest.raises(ConfigError, match=r"^--learn: a lesson needs .* where 1 MB are left: make room"):
        learn(lessons.plan())
    assert size_of(lessons.learned.lesson(ANN)) == 0 and learned_heads(lessons.learned.heads) == {}


def test_a_model_that_does_not_run_lean_is_told_in_a_line(lessons: Lessons, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson_module, "not_lean", lambda folder: "it sings")
    with pytest.raises(ModelError, match=r"^model=walker: does not run lean \(it sings\): no head is learned for it"):
        learn(lessons.plan())


def test_a_head_of_another_version_is_told_in_a_line_and_stays(taught: Lessons) -> None:
    head = learned_heads(taught.learned.heads)[ANN]
    changed = (head / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": 32')
    (head / "config.json").write_text(changed)
    said = reply(taught.plan())
    assert said.outcome is None and "hidden_size" in said.error and "\n" not in said.error
    assert [*learned_heads(taught.learned.heads)] == [ANN]


def test_heads_of_those_who_learned_longest_ago_are_removed_and_come_back_with_new_texts(taught: Lessons) -> None:
    heads = taught.learned.heads
    for number in range(MOST_LEARNED):
        place = heads / f"other {number}"
        shutil.copytree(heads / ANN, place, symlinks=True)
        (place / METHOD).unlink()
        (place / METHOD).symlink_to(next(place.glob(f".{METHOD}-*")).name)
    lesson_module.forget_heads(heads)
    assert ANN not in learned_heads(heads) and [*(heads / ANN).glob("*block*")] == [] and taught.learned.due() == []
    remember(taught.folder, "ann", range(1, 200, 4))
    assert taught.learned.due() == [ANN]


def test_a_lesson_is_due_when_there_is_half_as_much_again(taught: Lessons) -> None:
    remember(taught.folder, "ann", range(1, 1 + 4 * (LEAST_TEXTS - 1), 4))
    assert count_texts(taught.learned.texts / ANN) == 60 + LEAST_TEXTS - 1 and taught.learned.due() == []
    remember(taught.folder, "ann", [2])
    assert taught.learned.due() == [ANN]


def test_texts_that_come_during_a_lesson_count_for_the_next_one(
    lessons: Lessons, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trains(*given: Any, **named: Any) -> Any:
        remember(lessons.folder, "ann", range(1, 1 + 4 * LEAST_TEXTS, 4))
        (given[3] / "training").mkdir(parents=True)
        (given[3] / CURVE).write_text(json.dumps([(1, 0, [])]))
        return SimpleNamespace(chain_length=lambda: 1.0)

    monkeypatch.setattr(lesson_module, "train", trains)
    assert learn(lessons.plan()).texts == 60 and lessons.learned.due() == [ANN]


def test_a_lesson_takes_no_more_of_the_disk_than_it_may(lessons: Lessons, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, seen = Trainer.save, []

    def saves(trainer: Trainer, path: Path) -> None:
        usual(trainer, path)
        seen.append(size_of(lessons.learned.lesson(ANN)) + path.stat().st_size)  # two while one is replaced

    monkeypatch.setattr(Trainer, "save", saves)
    monkeypatch.setattr(lesson_module, "_KEPT_MINUTES", 0.0)
    monkeypatch.setattr(lesson_module, "_LEAST_STEPS", 20)
    costs = lesson_module._Costs.of(lessons.model, Recipe.model_validate(RECIPE))
    most = 2 * costs.checkpoint_bytes + 20 * 30 * costs.token_bytes
    assert learn(lessons.plan(most_bytes=most)).texts == 20
    assert len(seen) >= 20 and most / 2 < max(seen) <= most

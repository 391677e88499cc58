"""A model that walks around a cycle, texts of it, and lessons on these."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from drafters.learning.lesson import learn
from engine.files.cache_folder import CacheFolder
from engine.files.kept_texts import keep_text, shelf_of
from engine.files.lessons import LearnedFolder, LessonOutcome, LessonPlan
from tests.benchmarks.tuning.conftest import RECIPE, text_from, walker
from tests.drafters.conftest import compute_in_float32

__all__ = ["walker"]
ANN, BEN = shelf_of("ann"), shelf_of("ben")


def remember(folder: Path, owner: str, starts: Iterable[int]) -> None:
    """Keep the walks from these places as texts of an owner."""
    kept = CacheFolder(LearnedFolder(folder).texts, 1 << 24, "--learn")
    for start in starts:
        text = text_from(start, 30)
        keep_text(kept, owner, text[:5], text[5:])
    kept.close()


class Lessons:
    """The folder of a server that learns, and plans of lessons there."""

    def __init__(self, folder: Path, model: str, recipe: Path):
        self.folder, self.model, self.recipe = folder, model, recipe
        self.learned = LearnedFolder(folder)

    def plan(self, owner: str = ANN, **changes: Any) -> LessonPlan:
        named = {"name": "walker", "identity": "1", "general": "", "recipe": str(self.recipe), "most_bytes": 10**8}
        return LessonPlan(model=self.model, folder=str(self.folder), owner=owner, **named | changes)


def untaught(folder: Path, model: str) -> Lessons:
    """Keep texts of Ann's in a folder."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(RECIPE))
    made = Lessons(folder / "learned", model, recipe)
    remember(made.folder, "ann", range(0, 240, 4))
    return made


@pytest.fixture
def lessons(tmp_path: Path, walker: str) -> Lessons:
    return untaught(tmp_path, walker)


@pytest.fixture(scope="session")
def first_lesson(tmp_path_factory: pytest.TempPathFactory, walker: str) -> tuple[Lessons, LessonOutcome]:
    """Learn a head of Ann's texts, which no test changes."""
    made = untaught(tmp_path_factory.mktemp("first"), walker)
    with pytest.MonkeyPatch.context() as patched:
        compute_in_float32(patched)
        return made, learn(made.plan())


@pytest.fixture
def taught(first_lesson: tuple[Lessons, LessonOutcome], tmp_path: Path) -> Lessons:
    """Return a copy of the folder after the first lesson."""
    first, _ = first_lesson
    shutil.copytree(first.folder, tmp_path / "learned", symlinks=True)
    return Lessons(tmp_path / "learned", first.model, first.recipe)

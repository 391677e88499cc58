"""A model that walks around a cycle, texts of it, and lessons on these."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.files.cache_folder import CacheFolder
from engine.files.kept_texts import keep_text, shelf_of
from engine.files.lessons import LearnedFolder, LessonPlan
from tests.benchmarks.tuning.conftest import RECIPE, text_from, walker

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


@pytest.fixture
def lessons(tmp_path: Path, walker: str) -> Lessons:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(RECIPE))
    made = Lessons(tmp_path / "learned", walker, recipe)
    remember(made.folder, "ann", range(0, 240, 4))
    return made

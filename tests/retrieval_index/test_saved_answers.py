from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from engine.files.cache_folder import CacheFolder
from retrieval_index.saved_answers import SavedAnswers
from retrieval_index.session_index import SessionIndex

LARGE = 1 << 30


def keep(folder: Path, *answers: tuple[str, list[int]], identity: bytes = b"model" * 4) -> None:
    """Keep answers in this order, one second apart."""
    cache = CacheFolder(folder, LARGE)
    saved = SavedAnswers(cache, identity)
    for owner, answer in answers:
        saved.keep(owner, np.asarray(answer, np.int32))
    cache.close()
    for at, path in enumerate(sorted(folder.rglob("*.talon"), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (1e9 + at, 1e9 + at))


def latest(folder: Path, capacity: int = 100, identity: bytes = b"model" * 4) -> list[tuple[str, list[int]]]:
    cache = CacheFolder(folder, LARGE)
    found = [(owner, answer.tolist()) for owner, answer in SavedAnswers(cache, identity).latest(capacity)]
    cache.close()
    return found


def test_answers_are_found_with_their_owners_the_earliest_first(tmp_path: Path) -> None:
    answers = [("one", [1, 2, 3]), ("", [4]), ("\u00fc/2", [5, 2_000_000]), ("one", [])]
    keep(tmp_path, *answers)
    assert latest(tmp_path) == answers


def test_the_latest_ones_are_found_as_far_as_there_is_room(tmp_path: Path) -> None:
    keep(tmp_path, ("a", [1] * 10), ("b", [2] * 10), ("c", [3] * 10))
    assert [owner for owner, _ in latest(tmp_path, 25)] == ["b", "c"]


def test_answers_of_another_model_are_not_found(tmp_path: Path) -> None:
    keep(tmp_path, ("a", [1]))
    assert latest(tmp_path, identity=b"other" * 4) == []


def test_a_damaged_answer_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path, ("a", [1]), ("b", [2]))
    earliest = min(tmp_path.rglob("*.talon"), key=lambda path: path.stat().st_mtime)
    earliest.write_bytes(earliest.read_bytes()[:-1])
    assert latest(tmp_path) == [("b", [2])]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_index_drafts_from_what_an_earlier_one_was_told_for_the_same_owner(tmp_path: Path) -> None:
    def answered(owner: str | None, request: int) -> list[int]:
        """What is drafted after the prompt; the answer is then told."""
        cache = CacheFolder(tmp_path, LARGE)
        index = SessionIndex(saved=SavedAnswers(cache, b"model" * 4))
        index.start(request, [7, 8, 9], owner=owner)
        drafted = index.draft(request).tokens[1:].tolist()
        index.append(request, [11, 12, 13, 14, 15])
        index.finish(request)
        cache.close()
        return drafted

    assert [answered(owner, at)[:3] == [11, 12, 13] for at, owner in enumerate(["a", "b", None, "a", None])] == [
        False, False, False, True, False,
    ]  # fmt: skip

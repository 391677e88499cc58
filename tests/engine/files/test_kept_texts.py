"""Texts to learn from: by owner, bounded, whatever becomes of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.errors import ConfigError
from engine.files.cache_folder import CacheFolder
from engine.files.kept_texts import count_texts, keep_text, latest_texts, shelf_of


def keep(folder: Path, owner: str, *answers: list[int], most_bytes: int = 1 << 20) -> Path:
    """Keep answers to one prompt; return the owner's shelf."""
    kept = CacheFolder(folder, most_bytes, "--learn")
    for answer in answers:
        keep_text(kept, owner, [1, 2], answer)
    kept.close()
    return folder / shelf_of(owner)


def test_texts_are_found_by_their_owner_alone_the_latest_first(tmp_path: Path) -> None:
    ann, ben = keep(tmp_path, "ann", [3], [4, 5]), keep(tmp_path, "ben", [6])
    assert [(text.prompt.tolist(), text.answer.tolist()) for text in latest_texts(ann)] == [
        ([1, 2], [4, 5]),
        ([1, 2], [3]),
    ]
    assert [text.answer.tolist() for text in latest_texts(ben)] == [[6]]
    assert [*latest_texts(tmp_path / shelf_of(""))] == []


def test_the_same_text_is_kept_once_and_counted_by_its_age(tmp_path: Path) -> None:
    shelf = keep(tmp_path, "ann", [3], [3], [4])
    [newest, oldest] = sorted((file.stat().st_mtime_ns for file in shelf.glob("*.talon")), reverse=True)
    assert (count_texts(shelf), count_texts(shelf, oldest), count_texts(shelf, newest)) == (2, 1, 0)


def test_the_oldest_texts_make_room(tmp_path: Path) -> None:
    most = 40 * 4096
    for number in range(60):
        keep(tmp_path, "ann", [number], most_bytes=most)
    shelf = tmp_path / shelf_of("ann")
    kept = [text.answer.tolist() for text in latest_texts(shelf)]
    assert kept == [[59 - number] for number in range(len(kept))]
    assert 30 < len(kept) <= 40 and 4096 * len(kept) <= most


def test_a_damaged_text_is_removed_and_the_others_are_read(tmp_path: Path) -> None:
    shelf = keep(tmp_path, "ann", [3], [4])
    damaged = max(shelf.glob("*.talon"), key=lambda file: file.stat().st_mtime_ns)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (shelf / "notes.talon").write_text("no file of ours")
    assert [text.answer.tolist() for text in latest_texts(shelf)] == [[3]]
    assert not damaged.exists() and count_texts(shelf) == 1


def test_a_folder_that_cannot_be_written_to_is_named_by_its_option(tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("")
    with pytest.raises(ConfigError, match=r"^--learn="):
        CacheFolder(tmp_path / "texts", 1 << 20, "--learn")

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.files.whole_file import whole_file, write_whole


def test_what_stood_there_stays_until_all_is_written(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"old")
    with whole_file(tmp_path / "a") as file:
        file.write(b"new")
        assert (tmp_path / "a").read_bytes() == b"old"
    assert (tmp_path / "a").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    write_whole(tmp_path / "a", b"old")
    with pytest.raises(error), whole_file(tmp_path / "a") as file:
        file.write(b"half")
        raise error
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append((tmp_path / "a").exists()))
    write_whole(tmp_path / "a", b"x")
    assert seen == [False]


def test_threads_that_write_the_same_path_at_once_do_not_mix(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            for written in [pool.submit(write_whole, tmp_path / "a", content) for content in contents]:
                written.result()
            assert (tmp_path / "a").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["a"]

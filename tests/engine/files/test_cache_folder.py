from __future__ import annotations

import errno
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.core.errors import ConfigError
from engine.files import cache_folder
from engine.files.cache_folder import CacheFolder
from tests.engine.files.rights import ordinary_user

LARGE = 1 << 30
PAGE = 4096


def room() -> memoryview:
    return memoryview(bytearray(1 << 16))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def text(number: int) -> bytes:
    return bytes([number % 256]) * (PAGE - 100)  # a page with its header


def filled(folder: Path, numbers: range, most: int = LARGE) -> None:
    """Keep the contents of these numbers, in this order."""
    cache = CacheFolder(folder, most)
    for number in numbers:
        cache.keep("shelf", key(number), lambda number=number: [text(number)])
    cache.close()


def found(folder: Path, numbers: range) -> set[int]:
    """The numbers whose contents are there."""
    cache = CacheFolder(folder, LARGE)
    contents = {number: cache.read("shelf", key(number), room()) for number in numbers}
    cache.close()
    assert all(content in (None, text(number)) for number, content in contents.items())
    return {number for number, content in contents.items() if content is not None}


def test_what_is_kept_is_found_by_the_next_process_and_by_no_other_user(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    filled(folder, range(5))
    assert found(folder, range(6)) == {0, 1, 2, 3, 4}
    assert [(folder / name).stat().st_mode & 0o77 for name in (".", "shelf")] == [0, 0]


def test_to_keep_something_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    cache, goes_on = CacheFolder(tmp_path, LARGE), threading.Event()

    def slow() -> list[bytes]:
        goes_on.wait(30)
        return [b"x"]

    cache.keep("shelf", key(0), slow)
    cache.used("shelf", [key(0)])
    assert cache.read("shelf", key(0), room()) is None
    goes_on.set()
    cache.close()
    assert cache.read("shelf", key(0), room()) == b"x"


def test_what_is_there_is_not_written_again_and_what_is_gone_by_then_is_not_written(tmp_path: Path) -> None:
    filled(tmp_path, range(1))
    cache, asked = CacheFolder(tmp_path, LARGE), []
    cache.keep("shelf", key(0), lambda: asked.append(0))
    cache.keep("shelf", key(1), lambda: None)
    cache.close()
    assert not asked and found(tmp_path, range(2)) == {0}


def size(folder: Path) -> int:
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in folder.rglob("*") if path.is_file())


def test_the_folder_never_holds_more_than_it_may(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 40 * PAGE)
    for number in range(200):
        cache.keep("shelf", key(number), lambda number=number: [text(number)])
        if number % 20 == 0:
            time.sleep(0.01)
            assert size(tmp_path) <= 40 * PAGE
    cache.close()
    assert 20 * PAGE < size(tmp_path) <= 40 * PAGE
    assert found(tmp_path, range(200)) >= set(range(180, 200))


def test_a_shelf_whose_last_file_had_to_go_goes_too(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 20 * PAGE)
    for number in range(60):
        cache.keep(f"shelf-{number}", key(number), lambda number=number: [text(number)])
    cache.close()
    shelves = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(shelves) < 25 and all(any(shelf.iterdir()) for shelf in shelves)


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    filled(tmp_path, range(60))
    cache = CacheFolder(tmp_path, LARGE)
    cache.used("shelf", [key(number) for number in range(10)])
    cache.close()
    filled(tmp_path, range(60, 61), 32 * PAGE)
    assert found(tmp_path, range(61)) >= {*range(10), 59, 60}
    assert 10 not in found(tmp_path, range(61))


def test_of_a_text_the_end_goes_first(tmp_path: Path) -> None:
    filled(tmp_path, range(40))
    cache = CacheFolder(tmp_path, LARGE)
    cache.used("shelf", [key(number) for number in range(40)])
    cache.close()
    filled(tmp_path, range(0), 32 * PAGE)
    assert found(tmp_path, range(40)) == set(range(30))


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    names = ["shelf/notes.txt", f"shelf/{'0' * 64}", f"{'0' * 64}.talon", f"a/b/{'0' * 64}.talon"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(bytes(100 * PAGE))
    filled(tmp_path, range(40), 32 * PAGE)
    assert all((tmp_path / name).exists() for name in names) and len(found(tmp_path, range(40))) >= 28


def test_what_a_killed_writer_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    young, old = (tmp_path / "shelf" / f"{digit * 64}.talon.12-34.tmp" for digit in "01")
    young.write_bytes(b"half"), old.write_bytes(b"half")
    os.utime(old, (time.time() - 10_000, time.time() - 10_000))
    filled(tmp_path, range(2), PAGE)
    assert young.exists() and not old.exists()


def test_a_damaged_file_is_told_of_removed_and_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path, range(2))
    cache = CacheFolder(tmp_path, LARGE)
    path = cache.path("shelf", key(0))
    path.write_bytes(path.read_bytes()[:100])
    assert cache.read("shelf", key(0), room()) is None
    cache.keep("shelf", key(0), lambda: [text(0)])
    cache.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"verifier.cache={tmp_path}" in lines[0] and "damaged: ignored" in lines[0]
    assert found(tmp_path, range(2)) == {0, 1}


@pytest.mark.parametrize(("retry_s", "tries"), [(10.0, 1), (0.0, 6)])
def test_a_full_disk_costs_the_cache_alone_and_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, retry_s: float, tries: int
) -> None:
    filled(tmp_path, range(2))
    asked = []

    def full(*args: object) -> int:
        asked.append(args)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_folder, "write_checked", full)
    monkeypatch.setattr(cache_folder, "_RETRY_S", retry_s)
    filled(tmp_path, range(2, 8))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "No space left" in lines[0] and len(asked) == tries
    assert found(tmp_path, range(8)) == {0, 1}


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"verifier\.cache=.*name another"):
            CacheFolder(folder, LARGE)


def test_processes_that_share_a_folder_do_not_harm_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each reads, writes and evicts what the others do too."""

    def work(seed: int) -> None:
        rng, cache = random.Random(seed), CacheFolder(tmp_path, 32 * PAGE)
        for _ in range(300):
            number = rng.randrange(60)
            assert cache.read("shelf", key(number), room()) in (None, text(number))
            cache.keep("shelf", key(number), lambda number=number: [text(number)])
            cache.used("shelf", [key(rng.randrange(60))])
        cache.close()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result()
    assert capsys.readouterr().err == "" and found(tmp_path, range(60))
    assert size(tmp_path) <= 36 * PAGE


def test_what_is_written_takes_a_small_part_of_a_cores_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    cache = CacheFolder(tmp_path, LARGE)
    monkeypatch.setattr(cache._closing, "wait", lambda timeout: rests.append(timeout))
    begun = threading.Event()

    def content() -> list[bytes]:
        begun.set()
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return [b"x"]

    cache.keep("shelf", key(0), content)
    begun.wait(30)
    cache.close()
    assert max(rests) >= 9 * 0.02


def test_a_shelf_that_may_not_be_read_costs_itself_alone_and_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with ordinary_user() as folder:
        filled(folder, range(2))
        (folder / "closed").mkdir(0o300)
        cache = CacheFolder(folder, LARGE)
        assert cache.keys("closed") == cache.keys("closed") == []
        cache.keep("closed", key(0), lambda: [text(0)])
        cache.keep("shelf", key(2), lambda: [text(2)])
        cache.close()
        assert not cache.path("closed", key(0)).exists(), "what cannot be counted could grow without end"
        [line] = capsys.readouterr().err.splitlines()
        assert "closed cannot be read (Permission denied): ignored" in line
        assert found(folder, range(3)) == {0, 1, 2}


def test_a_disk_that_fails_at_every_call_costs_the_cache_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ESTALE, "gone")

    filled(tmp_path, range(1))
    for name in ("scandir", "stat", "mkdir", "unlink", "open", "utime"):
        monkeypatch.setattr(os, name, fail)
    cache = CacheFolder(tmp_path, LARGE)
    for _ in range(3):
        assert cache.keys("shelf") == [] and cache.read("shelf", key(0), room()) is None
        cache.keep("shelf", key(1), lambda: [text(1)])
        cache.used("shelf", [key(0)])
    cache.close()
    monkeypatch.undo()
    told = capsys.readouterr().err.splitlines()
    assert told and len(told) == len(set(told)) and all("gone" in line for line in told)
    assert found(tmp_path, range(2)) == {0}


def test_a_file_that_may_not_be_read_is_told_once_and_stays(capsys: pytest.CaptureFixture[str]) -> None:
    with ordinary_user() as folder:
        filled(folder, range(3))
        cache = CacheFolder(folder, LARGE)
        for number in range(2):
            cache.path("shelf", key(number)).chmod(0)
        assert [cache.read("shelf", key(number), room()) for number in (0, 1, 0)] == [None] * 3
        cache.close()
        [line] = capsys.readouterr().err.splitlines()
        assert "cannot be read (Permission denied)" in line
        for number in range(2):
            cache.path("shelf", key(number)).chmod(0o600)
        assert found(folder, range(3)) == {0, 1, 2}


def test_a_file_that_can_neither_be_read_nor_removed_does_not_stop_what_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ordinary_user() as folder:
        filled(folder, range(1))
        cache = CacheFolder(folder, LARGE)
        path = cache.path("shelf", key(0))
        path.write_bytes(b"damaged")
        path.parent.chmod(0o500)
        for _ in range(3):
            assert cache.read("shelf", key(0), room()) is None
        cache.keep("other", key(1), lambda: [text(1)])
        cache.close()
        assert cache.path("other", key(1)).exists() and len(capsys.readouterr().err.splitlines()) == 1


def test_a_directory_in_the_place_of_a_file_is_removed_and_the_file_written_again(tmp_path: Path) -> None:
    filled(tmp_path, range(1))
    path = tmp_path / "shelf" / f"{key(0).hex()}.talon"
    path.unlink()
    (path / "more").mkdir(parents=True)
    assert found(tmp_path, range(1)) == set()
    filled(tmp_path, range(1))
    assert found(tmp_path, range(1)) == {0}


def test_the_limit_holds_though_the_oldest_file_cannot_be_removed(capsys: pytest.CaptureFixture[str]) -> None:
    with ordinary_user() as folder:
        cache = CacheFolder(folder, LARGE)
        cache.keep("closed", key(0), lambda: [text(0)])
        cache.close()
        (folder / "closed").chmod(0o500)
        filled(folder, range(1, 200), 40 * PAGE)
        assert 20 * PAGE < size(folder) <= 40 * PAGE and not capsys.readouterr().err.splitlines()


def test_nothing_more_is_written_where_what_cannot_be_removed_takes_all_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "_RETRY_S", 0.0)
    with ordinary_user() as folder:
        filled(folder, range(50))
        (folder / "shelf").chmod(0o500)
        cache = CacheFolder(folder, 40 * PAGE)
        for number in range(50, 100):
            cache.keep("other", key(number), lambda number=number: [text(number)])
        cache.close()
        assert size(folder) == 50 * PAGE
        [line] = capsys.readouterr().err.splitlines()
        assert "204,800 bytes cannot be removed, more than verifier.cache_gb allows" in line


def test_a_shelf_that_is_a_link_counts_once(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    folder.mkdir(), elsewhere.mkdir()
    for name in ("shelf", "again"):
        (folder / name).symlink_to(elsewhere)
    (folder / "round").symlink_to(folder)
    filled(folder, range(200), 40 * PAGE)
    assert 20 * PAGE < size(elsewhere) <= 40 * PAGE

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest

from engine.files.checked_file import Damaged, read_checked, write_checked

KEY, OTHER = bytes(range(32)), bytes(32)
PARTS = [b"keys" * 100, bytearray(b"values" * 50)]
CONTENT = b"".join(PARTS)
ROOM = memoryview(bytearray(len(CONTENT)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_checked(tmp_path / "a", KEY, PARTS)
    return tmp_path / "a"


def test_the_parts_are_read_one_after_the_other_and_by_their_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "a"
    with pytest.raises(FileNotFoundError):
        read_checked(file, KEY, ROOM)
    assert write_checked(file, KEY, PARTS) == file.stat().st_size
    assert read_checked(file, KEY, ROOM) == CONTENT
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_is_no_file_of_that_key_and_size_is_not_read(file: Path) -> None:
    with pytest.raises(Damaged, match="another file"):
        read_checked(file, OTHER, ROOM)
    with pytest.raises(Damaged, match="bytes"):
        read_checked(file, KEY, ROOM[:-1])
    file.write_bytes(b"somebody else's" * 10)
    with pytest.raises(Damaged, match="no file of Talon's"):
        read_checked(file, KEY, ROOM)


def test_a_file_cut_at_any_place_is_damaged(file: Path) -> None:
    whole = file.read_bytes()
    for length in [0, 1, len(whole) - 1, *random.Random(0).sample(range(len(whole)), 50)]:
        file.write_bytes(whole[:length])
        with pytest.raises(Damaged):
            read_checked(file, KEY, ROOM)


def test_a_byte_that_changed_anywhere_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    for at in [*range(100), len(whole) - 1]:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(Damaged):
            read_checked(file, KEY, ROOM)


def test_a_pipe_under_the_files_name_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(Damaged):
        read_checked(tmp_path / "a", KEY, ROOM)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(file: Path) -> None:
    with pytest.raises(TypeError):
        write_checked(file, OTHER, [b"new", "no bytes"])
    assert read_checked(file, KEY, ROOM) == CONTENT
    assert [path.name for path in file.parent.iterdir()] == ["a"]

"""A model in several GGUF files, as llama-gguf-split writes them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType, GGUFWriter

from engine.core.errors import ModelError
from engine.weights.gguf.described_folder import described
from engine.weights.gguf.file import GgufFile, parts_of, read_gguf
from engine.weights.gguf.source import GgufSource, open_gguf
from tests.engine.weights.tiny_gguf import change_last_byte, write_all, write_gguf


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A tiny Llama in three files."""
    write_gguf(tmp_path / "tiny.gguf", kind=Kind.Q8_0, part_tensors=9)
    found = sorted(tmp_path.glob("tiny-*.gguf"))
    assert [path.name for path in found] == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return found


def told(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_gguf(path, f"model={path.name}")
    assert "\n" not in str(caught.value) and f"model={path.name}" in str(caught.value)
    return str(caught.value)


def content(file: GgufFile) -> dict[str, bytes]:
    return {tensor.name: file.read(tensor).tobytes() for tensor in file.tensors}


def test_any_part_gives_the_model_of_all(parts: list[Path], tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", kind=Kind.Q8_0)
    whole = read_gguf(tmp_path / "whole.gguf", "model=whole")
    for path in parts:
        file = read_gguf(path, "model=tiny")
        assert content(file) == content(whole) and file.path == parts[0]
        assert (file.size, file.elements, file.kinds) == (whole.size, whole.elements, whole.kinds)
        assert file.metadata["llama.block_count"] == 2


def test_names_that_are_no_parts_stand_for_themselves() -> None:
    for name in (
        "tiny.gguf",
        "tiny-00004-of-00003.gguf",
        "tiny-00001-of-00001.gguf",
        "a-1-of-3.gguf",
        "x-00001-of-00003",
    ):
        assert parts_of(Path(name)) == [Path(name)]
    assert [path.name for path in parts_of(Path("a-00002-of-00002.GGUF"))] == [
        f"a-0000{i}-of-00002.GGUF" for i in (1, 2)
    ]


@pytest.mark.parametrize(("missing", "named"), [(0, 0), (0, 2), (2, 0)])
def test_a_missing_part_is_named(parts: list[Path], missing: int, named: int) -> None:
    parts[missing].unlink()
    assert f"part {missing + 1} of 3 is missing: there is no {parts[missing]}; get it" in told(parts[named])
    with pytest.raises(ModelError, match="is missing: there is no"):
        described(parts[named], "model=x", lambda *_: None)


def test_parts_of_another_place_model_or_kind_are_told(parts: list[Path], tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", kind=Kind.Q8_0, part_tensors=5)
    foreign = "tiny-00002-of-00003.gguf is not this part of that model (its header says split.no"
    for content, why in (
        (parts[2].read_bytes(), f"{foreign} 2 of 3"),
        (next(tmp_path.glob("other-00002-of-*.gguf")).read_bytes(), f"{foreign} 1 of 4"),
        (parts[1].read_bytes()[:-1], "part tiny-00002-of-00003.gguf: the GGUF file is cut short"),
        (b"<html>", "part tiny-00002-of-00003.gguf: is no GGUF file"),
    ):
        parts[1].write_bytes(content)
        assert why in told(parts[0])


def further_part(path: Path, number: int, **values: str | int) -> None:
    """Write a part with one tensor, in place of one of three."""
    writer = GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    writer.add_key_value("split.no", number, GGUFValueType.UINT16)
    writer.add_key_value("split.count", 3, GGUFValueType.UINT16)
    for key, value in values.items():
        writer.add_key_value(key.replace("__", "."), value, GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    write_all(writer)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"general__name": "huge"}, "general.name is 'huge', and 'tiny' in the first part"),
        ({"general__architecture": "qwen2"}, "general.architecture is 'qwen2', and 'llama' in the first part"),
        ({"split__tensors__count": 1000}, "split.tensors.count is 1000, and 20 in the first part"),
        ({}, "tensor 'token_embd.weight' is in tiny-00001-of-00003.gguf too"),
    ],
)
def test_a_part_of_another_model_is_told(parts: list[Path], values: dict[str, str | int], why: str) -> None:
    further_part(parts[2], 2, **values)
    assert f"tiny-00003-of-00003.gguf is not this part of that model ({why})" in told(parts[1])


def test_parts_that_hold_fewer_tensors_than_they_say_are_told(parts: list[Path]) -> None:
    raw = parts[0].read_bytes()
    at = raw.index(b"split.tensors.count") + len("split.tensors.count") + 4
    for path in parts:  # all agree
        path.write_bytes(
            path.read_bytes().replace(raw[at - 23 : at + 4], raw[at - 23 : at] + (99).to_bytes(4, "little"))
        )
    assert "its parts hold 20 tensors, and 99 in all; get all parts of one model" in told(parts[0])


@pytest.mark.parametrize("part", [0, 2])
def test_a_part_that_changes_makes_it_another_model_and_one_that_was_copied_does_not(
    parts: list[Path], tmp_path: Path, part: int
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    GgufSource.of(parts[0], str(parts[0])).write(folder)
    os.utime(parts[part], ns=(0, 0))
    assert open_gguf(folder) is not None
    change_last_byte(parts[part])
    with pytest.raises(ModelError, match=r"^model=.* has changed; name the file itself: model=\S+$"):
        open_gguf(folder)
    parts[part].unlink()
    with pytest.raises(ModelError, match=rf"{parts[part]} cannot be read: No such file or directory; put it back, or"):
        open_gguf(folder)


def test_one_directory_describes_all_parts(parts: list[Path], describes_here: None) -> None:
    folders = {described(path, f"model={path}", lambda *_: None) for path in parts}
    assert len(folders) == 1
    opened = open_gguf(folders.pop())
    assert opened is not None and len(opened.tensors) == 20

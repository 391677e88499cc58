from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.core.errors import ModelError
from engine.weights.checkpoint import read_checkpoint

TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def save(file: Path, dtype: torch.dtype = torch.bfloat16, name: str = "a.weight") -> torch.Tensor:
    tensor = torch.linspace(-3, 5, 24).view(4, 6).to(dtype)
    save_file({name: tensor}, file)
    return tensor


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_those_of_the_file_from_any_of_them_on(tmp_path: Path, kind: str) -> None:
    tensor = save(tmp_path / "model.safetensors", TYPES[kind])
    found = read_checkpoint(tmp_path, "weights=q8_0")["a.weight"]
    assert (found.kind, found.shape, found.elements) == (kind, (4, 6), 24)
    assert np.array_equal(found.numbers(7, 11), tensor.float().flatten()[7:18].numpy())


def test_files_of_an_index_are_one_checkpoint_and_no_other_file_is_read(tmp_path: Path) -> None:
    for part, name in (("one", "a.weight"), ("two", "b.weight"), ("other", "c.weight")):
        save(tmp_path / f"{part}.safetensors", name=name)
    index = {"weight_map": {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_checkpoint(tmp_path, "weights=q8_0").keys() == {"a.weight", "b.weight"}


def test_a_missing_part_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    with pytest.raises(ModelError, match=r"^weights=q8_0: one\.safetensors cannot be read: No such file"):
        read_checkpoint(tmp_path, "weights=q8_0")


@pytest.mark.parametrize("index", [b"{", b"[]", b"{}", b"\xff", b'{"weight_map": 3}'])
def test_a_damaged_index_is_one_line(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ModelError, match=r"index\.json is damaged; get it again"):
        read_checkpoint(tmp_path, "weights=q8_0")


def header(about: object) -> bytes:
    text = json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text


def of_tensor(**changes: object) -> bytes:
    return header({"a": {"dtype": "BF16", "shape": [4, 6], "data_offsets": [0, 48]} | changes}) + bytes(48)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        (1 << 60).to_bytes(8, "little") + b"{}",
        header([]),
        header({"a": 3}),
        header({"a": {"dtype": "BF16"}}),
        of_tensor()[:-1],
        of_tensor(shape=[4, 7]),
        of_tensor(shape=[1 << 40, 1 << 40]),
        of_tensor(shape=[-4, -6]),
        of_tensor(shape=["x"]),
        of_tensor(data_offsets=[-48, 0]),
        of_tensor(data_offsets=[0, 48, 1]),
        of_tensor(data_offsets=["0", "48"]),
    ],
    ids=range(14),
)
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_checkpoint(tmp_path, "weights=q8_0")
    assert str(caught.value) == "weights=q8_0: model.safetensors is damaged or cut short; get it again"


def test_a_type_that_is_not_quantised_is_named(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", torch.int8)
    with pytest.raises(ModelError, match=r"^weights=q8_0: tensor a\.weight is stored as 'I8', and only F32, F16 and"):
        read_checkpoint(tmp_path, "weights=q8_0")


def test_a_directory_without_safetensors_is_told_to_do_without(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"takes a checkpoint of safetensors files, and .* has none; leave it out$"):
        read_checkpoint(tmp_path, "weights=q8_0")


def test_a_file_that_is_cut_while_it_is_read_is_one_line(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors")
    found = read_checkpoint(tmp_path, "weights=q8_0")["a.weight"]
    os.truncate(tmp_path / "model.safetensors", found.start + 20)
    with pytest.raises(ModelError, match="was cut short while it was read; get it again"):
        found.numbers(0, 24)


def test_a_file_that_takes_the_place_of_another_is_not_read_for_it(tmp_path: Path) -> None:
    tensor = save(tmp_path / "model.safetensors")
    found = read_checkpoint(tmp_path, "weights=q8_0")["a.weight"]
    save_file({"a.weight": torch.zeros(4, 6, dtype=torch.bfloat16)}, tmp_path / "other")
    (tmp_path / "other").replace(tmp_path / "model.safetensors")
    assert np.array_equal(found.numbers(0, 24), tensor.float().flatten().numpy())

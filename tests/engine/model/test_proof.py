"""Proofs that another file, version or writer left are no proofs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.kernels.attention.attention import Rule
from engine.model.proof import Proof
from engine.weights.gguf_source import GgufSource

RULES = {0: Rule(0.25, 12, 30.0, torch.tensor([1.0, 2.0])), 1: Rule(0.5)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    GgufSource("x.gguf", 1, 2, "head").write(tmp_path)
    return tmp_path


def proof(folder: Path, layers: int = 2, context: int = 512) -> Proof:
    return Proof(folder, layers, context, "bfloat16", "auto")


def test_what_was_found_is_read_again(folder: Path) -> None:
    proof(folder).write(RULES)
    found = proof(folder).read()
    assert found is not None and found[1] == RULES[1] and found[0].window == 12
    assert found[0].sinks is not None and found[0].sinks.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("changes", [{"layers": 3}, {"context": 256}])
def test_a_proof_of_another_model_or_context_is_none(folder: Path, changes: dict[str, int]) -> None:
    proof(folder).write(RULES)
    assert proof(folder, **changes).read() is None


def test_a_proof_that_was_copied_from_another_file_is_none(folder: Path, tmp_path: Path) -> None:
    proof(folder).write(RULES)
    other = tmp_path / "other"
    other.mkdir()
    GgufSource("y.gguf", 1, 2, "head").write(other)
    shutil.copy(folder / "proof-bfloat16.json", other)
    assert proof(other).read() is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff",
        b"[]",
        {"rules": None},
        {"rules": [{"scale": "0.5", "window": 0, "softcap": 0.0, "sinks": None}] * 2},
        {"rules": [{"scale": 0.5, "window": 0, "softcap": 0.0, "sinks": [[1.0], [2.0, 3.0]]}] * 2},
        {"rules": [{"scale": 0.5}] * 2},
        {"under": "x"},
    ],
)
def test_a_damaged_proof_is_none(folder: Path, damage: bytes | dict[str, Any]) -> None:
    proof(folder).write(RULES)
    file = folder / "proof-bfloat16.json"
    if not isinstance(damage, bytes):
        damage = msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | damage)
    file.write_bytes(damage)
    assert proof(folder).read() is None


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    (folder / "proof-bfloat16.json").mkdir()
    proof(folder).write(RULES)
    assert proof(folder).read() is None

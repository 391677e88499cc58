"""Which model it is, by which what is kept of answers and prompts is known again."""

from __future__ import annotations

from pathlib import Path

from engine.weights.identity import model_identity


def test_another_file_is_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    one = model_identity(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert model_identity(str(tmp_path)) != one


def test_the_proof_that_a_first_start_writes_makes_no_other_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    one = model_identity(str(tmp_path))
    (tmp_path / "proof-bfloat16.json").write_text("{}")
    assert model_identity(str(tmp_path)) == one


def test_a_directory_in_the_place_of_a_file_is_no_part_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = model_identity(str(tmp_path))
    (tmp_path / "config.json" / "within").mkdir(parents=True)
    assert model_identity(str(tmp_path)) == before

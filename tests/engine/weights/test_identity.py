"""Which model it is, by which what is kept of answers and prompts is known again."""

from __future__ import annotations

from pathlib import Path

from engine.weights.identity import model_identity


def test_another_file_is_another_model_but_for_proofs_and_directories(tmp_path: Path) -> None:
    """A first start writes proofs, and a directory may be in the place of a file."""
    (tmp_path / "config.json").write_text("{}")
    one = model_identity(str(tmp_path))
    (tmp_path / "proof-bfloat16.json").write_text("{}")
    (tmp_path / "tokenizer.json" / "within").mkdir(parents=True)
    assert model_identity(str(tmp_path)) == one
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert model_identity(str(tmp_path)) != one

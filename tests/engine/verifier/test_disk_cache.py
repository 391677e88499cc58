"""What the key of keys and values depends on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from engine.config import Config
from engine.model.target import Target
from engine.verifier import disk_cache as module
from engine.verifier.disk_cache import _identity, disk_cache


def identity(model: str, folder: Path, dtype: str = "float32") -> bytes | None:
    """Return the identity under which this model's bits are kept; None if nothing is kept."""
    target = Target.load(model, dtype, "cpu", 1 << 20)
    config = Config.model_validate({"model": model, "verifier": {"cache": str(folder)}})
    with disk_cache(config, target):
        assert target.pool is None or target.pool.free == target.pool.blocks
        return None if target.pool is None or target.pool.saved is None else target.pool.saved.identity


@pytest.fixture
def copy(tiny: str, tmp_path: Path) -> Path:
    """Return a copy of the model at another place, with the same times."""
    shutil.copytree(tiny, tmp_path / "copy")
    return tmp_path / "copy"


def test_it_stays_the_same_and_does_not_depend_on_where_the_model_is(tiny: str, tmp_path: Path, copy: Path) -> None:
    assert identity(tiny, tmp_path / "a") == identity(tiny, tmp_path / "b") == identity(str(copy), tmp_path / "a")


def test_another_type_is_another(tiny: str, tmp_path: Path) -> None:
    assert identity(tiny, tmp_path) != identity(tiny, tmp_path, "bfloat16")


def test_a_file_of_another_time_length_or_beginning_is_another_model(tmp_path: Path, copy: Path) -> None:
    seen = {identity(str(copy), tmp_path / "a")}
    weights = copy / "model.safetensors"
    os.utime(weights, (1, 1))
    seen.add(identity(str(copy), tmp_path / "a"))
    status = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-200:] = content[-400:-200]  # another weight, which the probe sees
    weights.write_bytes(content)
    os.utime(weights, (status.st_atime, status.st_mtime))
    seen.add(identity(str(copy), tmp_path / "a"))
    (copy / "generation_config.json").write_text('{"eos_token_id": 0 }')
    seen.add(identity(str(copy), tmp_path / "a"))
    assert len(seen) == 4


def test_other_kernels_or_libraries_are_another(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {identity(tiny, tmp_path)}
    monkeypatch.setattr(module, "machine_code", lambda: "another processor")
    seen.add(identity(tiny, tmp_path))
    monkeypatch.setattr(module, "version", lambda name: "99")
    seen.add(identity(tiny, tmp_path))
    assert len(seen) == 3


def test_arithmetic_that_nobody_names_is_seen_in_the_bits_of_a_text(tiny: str) -> None:
    target = Target.load(tiny, "float32", "cpu", 1 << 20)
    before, run = _identity(tiny, target), target.run
    target.run = lambda *args: (run(*args)[0].bfloat16().float(), None)  # type: ignore[method-assign]
    assert _identity(tiny, target) != before


def test_a_target_whose_bits_depend_on_the_batch_keeps_nothing_and_says_why(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert identity(tiny, tmp_path, "float16") is None
    assert "keys and values are not kept: its type is float16" in capsys.readouterr().err

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.weights.tiny_gguf import described_gguf, write_gguf


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache folder of its own, which nobody has made yet."""
    monkeypatch.setenv("TALON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a GGUF file."""

    def write(**changes: Any) -> Path:
        write_gguf(tmp_path / "tiny.gguf", **changes)
        return tmp_path / "tiny.gguf"

    return write


@pytest.fixture
def directory(write: Callable[..., Path]) -> Callable[..., Path]:
    """Write a GGUF file and describe it."""
    return lambda **changes: Path(described_gguf(write(**changes)))

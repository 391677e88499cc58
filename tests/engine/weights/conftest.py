from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache folder of its own, which nobody has made yet."""
    monkeypatch.setenv("TALON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"

"""The target of engines whose workers are killed: processes, started again and again."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny(tiny_gguf: str) -> str:
    """Return the target that starts quickly."""
    return tiny_gguf

"""The target of engines that start and end: their workers are processes."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny(tiny_gguf: str) -> str:
    """Return the target that starts quickly."""
    return tiny_gguf

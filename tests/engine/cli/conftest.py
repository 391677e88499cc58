"""The target of commands: some are processes of their own."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny(tiny_gguf: str) -> str:
    """Return the target that starts quickly."""
    return tiny_gguf

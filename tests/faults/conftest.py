"""The target of engines whose workers are killed: processes, started again and again."""

from __future__ import annotations

import pytest

from tests.forked_process import fork_server


@pytest.fixture(scope="session")
def tiny(tiny_gguf: str) -> str:
    """Return the target that starts quickly."""
    return tiny_gguf


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Start what forks workers before a test counts processes."""
    fork_server()

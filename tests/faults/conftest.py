"""The target of engines whose workers are killed: processes, started again and again."""

from __future__ import annotations

import pytest

from tests.forked_worker import fork_workers


@pytest.fixture(scope="session")
def tiny(tiny_gguf: str) -> str:
    """Return the target that starts quickly."""
    return tiny_gguf


@pytest.fixture(autouse=True)
def _forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers; slow tests watch the memory and the starts of whole processes."""
    if request.node.get_closest_marker("slow") is None:
        fork_workers(monkeypatch)

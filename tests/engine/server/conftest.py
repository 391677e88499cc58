"""One server of a tiny model for all tests that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="pip install 'talon-decoding[serve]'")

from tests.engine.server.process import KEY, ServerProcess, serving
from tests.engine.server.tool_model import save_tool_model
from tests.engine.weights.tiny_gguf import save_tiny_gguf


@pytest.fixture(scope="session")
def tiny(tiny_gguf: str) -> str:
    """Return the target that starts quickly."""
    return tiny_gguf


@pytest.fixture(scope="session")
def server(tiny: str) -> Iterator[ServerProcess]:
    # every draft is verified, whether it is worth it or not
    drafted = ("--method", "pld", "--set", "verifier.cut=false")
    with serving("--set", f"model={tiny}", "--served-model-name", "tiny", *drafted) as running:
        yield running


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start a server whose model calls tools and fills in."""
    model = save_tool_model(tmp_path_factory.mktemp("tools"))
    with serving("--set", f"model={model}", "--served-model-name", "tiny", "--method", "pld") as running:
        yield running


@pytest.fixture(scope="session")
def one_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start a server that wants KEY and answers one request at a time, for which it may take long."""
    model = save_tiny_gguf(tmp_path_factory.mktemp("long"), max_position_embeddings=32768)
    options = ("--set", f"model={model}", "--served-model-name", "tiny", "--method", "none", "--queue", "1")
    with serving(*options, TALON_API_KEYS=KEY) as running:
        yield running

"""One server of a tiny model for all tests that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="pip install 'talon-decoding[serve]'")

from tests.engine.server.process import ServerProcess, serving


@pytest.fixture(scope="session")
def server(tiny: str) -> Iterator[ServerProcess]:
    drafted = ("--method", "pld", "--set", "verifier.cut=false")  # every draft is verified, be it worth it or not
    with serving("--set", f"model={tiny}", "--served-model-name", "tiny", *drafted) as running:
        yield running

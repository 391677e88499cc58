"""Triton's interpreter, as fast as it gets, and forwards of few rows for it."""

from __future__ import annotations

import pytest

from tests.interpreted_triton import replace_language_once


@pytest.fixture(autouse=True, scope="session")
def _language_is_replaced_once() -> None:
    replace_language_once()


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch, no_gradients: None) -> None:
    """Let forwards have few rows, and compute no gradients."""
    from tests.engine.model.cuda.tiny_forward import use_small_sizes  # it needs Triton

    use_small_sizes(monkeypatch)


@pytest.fixture
def products_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.model.cuda.tiny_forward import multiply_by_rows

    multiply_by_rows(monkeypatch)

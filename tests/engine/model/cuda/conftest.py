"""Triton's interpreter, as fast as it gets."""

from __future__ import annotations

import pytest

from tests.interpreted_triton import replace_language_once


@pytest.fixture(autouse=True, scope="session")
def _language_is_replaced_once() -> None:
    replace_language_once()

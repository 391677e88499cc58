"""Tests attention windows on a short text.

Real windows span thousands of positions, more than a check at load can read. What a layer does at a window's edge does
not depend on the window's size, so models are tested with short ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SHORT = 8
_KEYS = ("sliding_window", "attention_chunk_size")  # models read these for their masks at every forward


def has_windows(config: Any) -> bool:
    """Return whether the configuration names a window that `short_windows` changes."""
    return bool(_named(config))


@contextmanager
def short_windows(config: Any) -> Iterator[None]:
    """Make every window that the configuration names SHORT positions in this context."""
    named = _named(config)
    for key in named:
        setattr(config, key, SHORT)
    try:
        yield
    finally:
        for key, value in named.items():
            setattr(config, key, value)


def _named(config: Any) -> dict[str, int]:
    return {key: value for key in _KEYS if isinstance(value := getattr(config, key, None), int) and value > SHORT}

"""Where Talon's own files are: at the top of a checkout, inside this package in an installed wheel.

A wheel must not claim common names such as `configs`, `models` and `benchmarks`.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_IS_WHEEL = (_PACKAGE / "data").is_dir()

ROOT = _PACKAGE / "data" if _IS_WHEEL else _PACKAGE.parent
"""The folder that holds configs/ and models/."""
BENCHMARKS = "engine.benchmarks" if _IS_WHEEL else "benchmarks"
"""The name of the benchmarks package."""

"""Where what comes with Talon lies: at the top of a checkout, inside this package once a wheel is installed.

A wheel must not take names such as `configs`, `models` and `benchmarks` from everybody else.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_IS_WHEEL = (_PACKAGE / "data").is_dir()

ROOT = _PACKAGE / "data" if _IS_WHEEL else _PACKAGE.parent
"""The folder of configs/ and models/."""
BENCHMARKS = "engine.benchmarks" if _IS_WHEEL else "benchmarks"
"""The package of that name."""

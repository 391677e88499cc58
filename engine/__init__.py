"""Talon: asynchronous, hybrid, lossless speculative decoding.

`from engine import Engine, SamplingParams`. Names load on first use, so that workers import only what they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.answer import Metrics, Piece, Result
    from engine.api import Engine
    from engine.config import Config
    from engine.core.errors import TalonError
    from engine.core.grammar import Grammar
    from engine.core.params import SamplingParams, Speculation
    from engine.wire.messages import TokenLogprob

__all__ = [
    "Config",
    "Engine",
    "Grammar",
    "Metrics",
    "Piece",
    "Result",
    "SamplingParams",
    "Speculation",
    "TalonError",
    "TokenLogprob",
]

_HOMES = {
    "Config": "engine.config",
    "Engine": "engine.api",
    "Grammar": "engine.core.grammar",
    "Metrics": "engine.answer",
    "Piece": "engine.answer",
    "Result": "engine.answer",
    "SamplingParams": "engine.core.params",
    "Speculation": "engine.core.params",
    "TalonError": "engine.core.errors",
    "TokenLogprob": "engine.wire.messages",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

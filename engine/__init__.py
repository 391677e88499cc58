"""Talon: asynchronous, hybrid, lossless speculative decoding.

`from engine import Engine, SamplingParams`. Names load on first use, so that workers import only what they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.answer import Metrics, Piece, Result
    from engine.api import Engine
    from engine.config import Config
    from engine.errors import TalonError
    from engine.grammar import Grammar
    from engine.messages import TokenLogprob
    from engine.sampling import SamplingParams, Speculation

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
    "Grammar": "engine.grammar",
    "Metrics": "engine.answer",
    "Piece": "engine.answer",
    "Result": "engine.answer",
    "SamplingParams": "engine.sampling",
    "Speculation": "engine.sampling",
    "TalonError": "engine.errors",
    "TokenLogprob": "engine.messages",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

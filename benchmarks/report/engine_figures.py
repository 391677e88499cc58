"""From the turns of Talon and other engines to a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from .figures import PLAIN
from .load_figures import at_once
from .ratios import Ratios, Where
from .tables import Table

ROWS = "rivals.jsonl"


class Turn(msgspec.Struct, frozen=True):
    """A line of rivals.jsonl. tokens: of each answer; seconds: for all of them. talon: it is one of ours."""

    contestant: str
    weights: str
    at_once: int
    repeat: int
    seconds: float
    tokens: list[int]
    talon: bool = False

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(self.tokens) / self.seconds


def rates(turns: Sequence[Turn], name: str, level: int) -> dict[int, float]:
    """Tokens a second by repeat."""
    return {turn.repeat: turn.rate for turn in turns if (turn.contestant, turn.at_once) == (name, level)}


def ratios(turns: Sequence[Turn]) -> Ratios:
    """Tokens a second over those of Talon's plain decoding, by repeat."""
    found: dict[Where, dict[Any, float]] = {}
    plain = {(turn.at_once, turn.repeat): turn.rate for turn in turns if turn.contestant == PLAIN}
    for turn in turns:
        if (turn.at_once, turn.repeat) in plain:
            some = found.setdefault(("engines", at_once(turn.at_once), turn.contestant), {})
            some[turn.repeat] = turn.rate / plain[turn.at_once, turn.repeat]
    return found


def speeds(turns: Sequence[Turn]) -> dict[str, dict[int, float]]:
    """Median tokens a second by contestant and requests at once, the fastest at the most requests first."""
    levels = sorted({turn.at_once for turn in turns})
    found = {
        name: {level: median(some) for level in levels if (some := rates(turns, name, level).values())}
        for name in dict.fromkeys(turn.contestant for turn in turns)
    }
    return dict(sorted(found.items(), key=lambda one: -one[1].get(levels[-1], 0.0)))


def is_small(weights: str) -> bool:
    """Whether a weight has fewer than 16 bits."""
    return weights not in ("bfloat16", "float16", "float32")


def label(turn: Turn) -> str:
    return f"Talon {turn.contestant}".replace("Talon talon", "Talon") if turn.talon else turn.contestant


def table(turns: Sequence[Turn]) -> Table:
    """A row for each contestant: median tokens a second, and the median of its ratios to Talon's plain decoding."""
    found, one, over = speeds(turns), {turn.contestant: turn for turn in turns}, ratios(turns)
    levels = sorted({turn.at_once for turn in turns})
    rows = []
    for name, by_level in found.items():
        shown = []
        for level in levels:
            mine = over.get(("engines", at_once(level), name))
            shown.append(f"{by_level[level]:.0f} ({median(mine.values()):.2f}x)" if mine else "-")
        rows.append([label(one[name]), one[name].weights, *shown])
    title = "Engines: tokens/s in all, and how many times Talon's plain decoding"
    return Table(title, ("engine", "weights", *map(at_once, levels)), rows, words=2)

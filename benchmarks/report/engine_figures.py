"""Makes a table from the turns of Talon and other engines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median
from typing import Any

import msgspec

from .figures import PLAIN
from .load_figures import at_once
from .ratios import Ratios, Where
from .tables import Table, known

ROWS = "rivals.jsonl"
_OURS = {PLAIN: "plain", "talon": "head and suffix"}


class Turn(msgspec.Struct, frozen=True):
    """A line of rivals.jsonl. tokens: of each answer; seconds: for all of them. talon: it is one of ours.
    weights: their type in memory; activations: the type by which they are multiplied. start_s: until the engine was
    ready for this repeat; memory_mb: PSS of all its processes after the turn. Older runs have neither.
    """

    contestant: str
    weights: str
    activations: str
    at_once: int
    repeat: int
    seconds: float
    tokens: list[int]
    talon: bool = False
    start_s: float | None = None
    memory_mb: float | None = None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(self.tokens) / self.seconds

    @property
    def group(self) -> str:
        """The group that the engine is compared in: engines that read the same bits and multiply alike."""
        return f"{self.weights} by {self.activations}"

    @property
    def label(self) -> str:
        return f"Talon, {_OURS.get(self.contestant, self.contestant)}" if self.talon else self.contestant


Contestant = tuple[str, str]
"""A group and a label."""


def rates(turns: Sequence[Turn], one: Contestant, level: int) -> dict[int, float]:
    """Return tokens a second by repeat."""
    return {turn.repeat: turn.rate for turn in turns if (turn.group, turn.label, turn.at_once) == (*one, level)}


def ratios(turns: Sequence[Turn]) -> Ratios:
    """Return tokens a second over those of Talon's plain decoding in the same group, by repeat."""
    found: dict[Where, dict[Any, float]] = {}
    plain = {(t.group, t.at_once, t.repeat): t.rate for t in turns if t.talon and t.contestant == PLAIN}
    for turn in turns:
        if base := plain.get((turn.group, turn.at_once, turn.repeat)):
            found.setdefault(_where(turn.group, turn.label, turn.at_once), {})[turn.repeat] = turn.rate / base
    return found


def _where(group: str, label: str, level: int) -> Where:
    return "engines", at_once(level), f"{label}, {group}"


def speeds(turns: Sequence[Turn]) -> dict[Contestant, dict[int, float]]:
    """Return median tokens a second by contestant and requests at once: group by group, the fastest of one request
    first.
    """
    levels = sorted({turn.at_once for turn in turns})
    groups = [*dict.fromkeys(turn.group for turn in sorted(turns, key=lambda turn: not turn.talon))]
    found = {
        one: {level: median(some) for level in levels if (some := rates(turns, one, level).values())}
        for one in dict.fromkeys((turn.group, turn.label) for turn in turns)
    }
    return dict(sorted(found.items(), key=lambda one: (groups.index(one[0][0]), -one[1].get(levels[0], 0.0))))


def table(turns: Sequence[Turn]) -> Table:
    """Make a row for each contestant, those of a group together: median tokens a second, the least and the most of its
    turns if there are several, and the median of their ratios to Talon's plain decoding of the group; then the median
    of starts, and the most memory.
    """
    over = ratios(turns)
    levels = sorted({turn.at_once for turn in turns})
    rows = []
    for group, label in speeds(turns):
        shown = []
        for level in levels:
            mine = over.get(_where(group, label, level))
            ratio = f" ({median(mine.values()):.2f}x)" if mine else ""
            shown.append(_spread(rates(turns, (group, label), level).values()) + ratio)
        mine_of = [turn for turn in turns if (turn.group, turn.label) == (group, label)]
        starts = [turn.start_s for turn in mine_of if turn.start_s is not None]
        memory = max((turn.memory_mb for turn in mine_of if turn.memory_mb is not None), default=None)
        rows.append([label, group, *shown, known(median(starts) if starts else None, ".1f"), known(memory, ".0f")])
    title = "Engines: tokens/s in all, and how many times Talon's plain decoding of the same weights and activations"
    return Table(title, ("engine", "weights by activations", *map(at_once, levels), "start s", "MB"), rows, words=2)


def _spread(some: Collection[float]) -> str:
    """Return the median, and the least and the most of several."""
    if not some:
        return "-"
    return f"{median(some):.1f}" + (f", {min(some):.1f}-{max(some):.1f}" if len(some) > 1 else "")

"""Draws pictures in Okabe and Ito's colours, which people with any kind of colour vision can tell apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .engine_figures import Turn, rates, speeds
from .figures import PLAIN, Row, summaries, tokens_a_round
from .load_figures import Level, at_once

OURS, PUBLISHED, OTHERS = "#0072B2", "#999999", "#E69F00"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
LINES, MARKERS = ("-", "--", "-.", ":"), "os^Dv"
_OURS = ("talon", "hybrid", "+")  # prefixes of our own methods' names
_METHODS = {OURS: "Talon", PUBLISHED: "plain, or as published", OTHERS: "transformers"}
_ENGINES = {OURS: "Talon", OTHERS: "others"}


class Bar(NamedTuple):
    """A bar with its interval. low, high: the ends of its interval."""

    label: str
    value: float
    low: float
    high: float
    colour: str


def bars(shown: Mapping[str, Sequence[Bar]], xlabel: str, kinds: Mapping[str, str], path: Path, form: str) -> None:
    """Draw a panel of horizontal bars for each key, the first bar on top, with their intervals and figures (`form`).
    kinds: what the colours mean.
    """
    columns = min(2, len(shown))
    lines = -(-len(shown) // columns)
    height = 0.3 * max(map(len, shown.values())) + 1.2
    figure, axes = panels(lines, columns, 5.5 * columns, height * lines)
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # keeps error bars from crossing out figures
    for axis, (title, panel) in zip(axes.flat, shown.items(), strict=False):
        panel = [*reversed(panel)]
        values, colours = [bar.value for bar in panel], [bar.colour for bar in panel]
        drawn = axis.barh([bar.label for bar in panel], values, xerr=_errors(panel), color=colours, ecolor="#333333")
        axis.bar_label(drawn, [format(value, form) for value in values], padding=12, fontsize=9, bbox=box)
        axis.set(title=title, xlabel=xlabel, xlim=(0, 1.2 * max(bar.high for bar in panel)))
    used = {bar.colour for panel in shown.values() for bar in panel}
    patches = [Patch(color=colour, label=kind) for colour, kind in kinds.items() if colour in used]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), fontsize=8, frameon=False)
    save(figure, path)


def _errors(panel: Sequence[Bar]) -> list[list[float]]:
    """Return the lengths of the error bars on both sides: a bound may equal the value, or miss it by rounding."""
    return [[max(0.0, bar.value - bar.low) for bar in panel], [max(0.0, bar.high - bar.value) for bar in panel]]


def lines(axis: Axes, curves: Mapping[str, tuple[Iterable[float], Iterable[float]]], **settings: Any) -> None:
    """Draw a line with markers for each curve, by its label. settings: of the axis."""
    for place, (name, (x, y)) in enumerate(curves.items()):
        dashes, marker = LINES[place % 4], MARKERS[place % 5]
        axis.plot([*x], [*y], dashes, color=COLOURS[place % 7], marker=marker, markersize=4, label=name)
    axis.set(**settings)
    axis.legend(fontsize=8)


def panels(lines: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure, and its axes, [lines, columns]."""
    return plt.subplots(lines, columns, figsize=(width, height), squeeze=False, layout="constrained")


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)


def speed_up_bars(suites: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draw speed-ups over plain decoding: a bar for each contestant, the fastest on top, in a panel for each set of
    rows.
    """
    found = {
        title: [Bar(one.method, one.speed_up, one.low, one.high, _colour_of(one.method)) for one in summaries(rows)]
        for title, rows in suites.items()
    }
    bars(found, "speed-up over plain decoding (median over prompts, 95% interval)", _METHODS, path, ".2f")


def _colour_of(method: str) -> str:
    return OURS if method.startswith(_OURS) else OTHERS if method.startswith("hf") else PUBLISHED


def accepted_lengths(rows: Sequence[Row], path: Path, most: int = 12) -> None:
    """Draw the share of rounds by tokens emitted, for the contestants that accept most."""
    drafting = [one for one in summaries(rows) if one.method != PLAIN and one.mean_accepted_tokens is not None]
    curves = {}
    for one in sorted(drafting, key=lambda one: -(one.mean_accepted_tokens or 0))[:5]:
        mine, counts = [row for row in rows if row.method == one.method], Counter[int]()
        for row in mine:
            for length, count in row.accepted.items():
                counts[min(int(length), most)] += count
        name = f"{one.method} (mean {tokens_a_round(mine):.2f})"
        curves[name] = range(1, most + 1), [counts[n] / counts.total() for n in range(1, most + 1)]
    figure, ((axis,),) = panels(1, 1, 7.5, 3.6)
    lines(axis, curves, xlabel=f"tokens emitted in a round (the last: {most} or more)", ylabel="share of rounds")
    save(figure, path)


def concurrency(levels: Sequence[Level], path: Path) -> None:
    """Draw tokens a second of all requests together against the number at once, a line for each method."""
    curves = {}
    for method in dict.fromkeys(line.method for line in levels):
        mine = [line for line in levels if line.method == method]
        curves[method] = [line.concurrency for line in mine], [line.tokens_per_second for line in mine]
    shown = sorted({line.concurrency for line in levels})
    figure, ((axis,),) = panels(1, 1, 7.5, 3.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(shown, [str(level) for level in shown])
    lines(axis, curves, xlabel="requests at once", ylabel="tokens/s, all together", ylim=(0, None))
    save(figure, path)


def engines(turns: Sequence[Turn], path: Path) -> None:
    """Draw total tokens a second, a panel for each number of requests at once and each group of engines with ours in
    it.
    """
    ours = {(turn.group, turn.label) for turn in turns if turn.talon}
    groups = [*dict.fromkeys(group for group, _ in speeds(turns) if group in dict(ours))]
    shown: dict[str, list[Bar]] = {}
    for group in groups:
        for level in sorted({turn.at_once for turn in turns}):
            for one, by_level in speeds(turns).items():
                if one[0] == group:
                    spread = [*rates(turns, one, level).values()] or [0.0]
                    colour = OURS if one in ours else OTHERS
                    bar = Bar(one[1], by_level.get(level, 0.0), min(spread), max(spread), colour)
                    shown.setdefault(f"{group}: {at_once(level)}", []).append(bar)
    bars(shown, "tokens/s in all", _ENGINES, path, ".0f")

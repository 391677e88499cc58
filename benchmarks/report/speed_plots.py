"""Pictures of speeds: over plain decoding, of many requests at once, and against other engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch

from .figures import Row, Summary, summaries
from .load_figures import Level, at_once
from .plot_style import BASELINES, OURS, PEERS, colour_of, line_style, save
from .rival_figures import Turn, is_small, label, rates, speeds


def speed_up_bars(rows: Sequence[Row], path: Path) -> None:
    """Speed-up over plain decoding per suite: a bar per contestant, its 95% interval, the fastest on top."""
    suites = list(dict.fromkeys(row.suite for row in rows))
    columns = min(2, len(suites))
    lines = -(-len(suites) // columns)
    methods = len({row.method for row in rows})
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, (0.27 * methods + 1.1) * lines), squeeze=False)
    for place, axis in enumerate(axes.flat):
        if place >= len(suites):
            axis.axis("off")
            continue
        table = sorted(summaries([row for row in rows if row.suite == suites[place]]), key=lambda s: s.speed_up)
        errors = _intervals(table)
        colours = [colour_of(s.method) for s in table]
        axis.barh([s.method for s in table], [s.speed_up for s in table], xerr=errors, color=colours, ecolor="#333333")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(suites[place])
        axis.set_xlabel("speed-up over plain decoding")
    save(figure, path)


def _intervals(table: Sequence[Summary]) -> list[list[float]]:
    """Lengths of the error bars on both sides: a bound may equal the median, or miss it by rounding."""
    return [[max(0.0, s.speed_up - s.low) for s in table], [max(0.0, s.high - s.speed_up) for s in table]]


def summary_bars(rows: Sequence[Row], path: Path) -> None:
    """The same over all suites, with the number on each bar: the picture of docs/benchmarks.md."""
    table = sorted(summaries(rows), key=lambda s: s.speed_up)
    figure, axis = plt.subplots(figsize=(7.5, 0.3 * len(table) + 1.2))
    errors = _intervals(table)
    bars = axis.barh(
        [s.method for s in table],
        [s.speed_up for s in table],
        xerr=errors,
        color=[colour_of(s.method) for s in table],
        ecolor="#333333",
    )
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # keeps the line at 1 from crossing out figures
    axis.bar_label(bars, [f"{s.speed_up:.2f}x" for s in table], padding=14, fontsize=9, bbox=box)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlim(0, 1.15 * max(s.high for s in table))
    axis.set_xlabel("speed-up over plain decoding (median over prompts, 95% interval)")
    kinds = ((OURS, "Talon"), (BASELINES, "baselines, as published"), (PEERS, "transformers"))
    shown = {colour_of(s.method) for s in table}
    patches = [Patch(color=colour, label=kind) for colour, kind in kinds if colour in shown]
    axis.legend(handles=patches, loc="lower right", fontsize=8)
    save(figure, path)


def concurrency(lines: Sequence[Level], path: Path) -> None:
    """Tokens a second of all requests together against the number at once, a line for each method."""
    figure, axis = plt.subplots(figsize=(7.5, 3.8))
    for place, method in enumerate(dict.fromkeys(line.method for line in lines)):
        mine = [line for line in lines if line.method == method]
        at, speeds = [line.concurrency for line in mine], [line.tokens_per_second for line in mine]
        axis.plot(at, speeds, **line_style(place), label=method)
    at_once = sorted({line.concurrency for line in lines})
    axis.set_xscale("log", base=2)
    axis.set_xticks(at_once, [str(level) for level in at_once])
    axis.set(xlabel="requests at once", ylabel="tokens/s, all together", ylim=(0, None))
    axis.legend(fontsize=9)
    save(figure, path)


def engines(turns: Sequence[Turn], path: Path) -> None:
    """Total tokens a second of Talon's methods and other engines, a panel for each number of requests at once."""
    found, one = speeds(turns), {turn.contestant: turn for turn in turns}
    levels = sorted({turn.at_once for turn in turns})
    figure, axes = plt.subplots(
        1, len(levels), figsize=(5 * len(levels), 0.3 * len(found) + 1.2), squeeze=False, sharey=True
    )
    names = [*reversed(found)]
    labels = [label(one[name]) + ("" if one[name].weights in name else f", {one[name].weights}") for name in names]
    for axis, level in zip(axes[0], levels, strict=True):
        values = [found[name].get(level, 0.0) for name in names]
        spread = [rates(turns, name, level).values() or [0.0] for name in names]
        errors = [
            [v - min(s) for v, s in zip(values, spread, strict=True)],
            [max(s) - v for v, s in zip(values, spread, strict=True)],
        ]
        colours = [OURS if one[name].talon else PEERS if is_small(one[name].weights) else BASELINES for name in names]
        bars = axis.barh(labels, values, xerr=errors, color=colours, ecolor="#333333")
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axis.bar_label(bars, [f"{value:.0f}" if value else "-" for value in values], padding=8, fontsize=9, bbox=box)
        axis.set(title=at_once(level), xlabel="tokens/s in all", xlim=(0, 1.18 * max(max(s) for s in spread)))
    kinds = ((OURS, "Talon"), (BASELINES, "16 bits a weight"), (PEERS, "fewer bits a weight"))
    used = {bar for axis in axes[0] for bar in (patch.get_facecolor() for patch in axis.patches)}
    handles = [Patch(color=colour, label=kind) for colour, kind in kinds if to_rgba(colour) in used]
    axes[0][-1].legend(handles=handles, loc="lower right", fontsize=8)
    save(figure, path)

"""The report's pictures. Okabe and Ito's colours, which people with any kind of colour vision can tell apart."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from .figures import BASELINE, Row, summaries
from .growth import Grown
from .load_figures import Level, at_once
from .profile import Profile
from .rivals.figures import Turn, is_small, label, rates, speeds
from .shapes import Shape

OURS, BASELINES, PEERS = "#0072B2", "#999999", "#E69F00"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
LINES, MARKERS = ("-", "--", "-.", ":"), "os^Dv"
HATCHES = ("", "//", "..", "xx", "\\\\")
"""Besides colours, so that a line is known in black and white too."""
_OURS = ("talon", "hybrid", "+")  # how the names of ours begin


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
        errors = [[s.speed_up - s.low for s in table], [s.high - s.speed_up for s in table]]
        colours = [_colour(s.method) for s in table]
        axis.barh([s.method for s in table], [s.speed_up for s in table], xerr=errors, color=colours, ecolor="#333333")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(suites[place])
        axis.set_xlabel("speed-up over plain decoding")
    _save(figure, path)


def summary_bars(rows: Sequence[Row], path: Path) -> None:
    """The same over all suites, with the number on each bar: the picture of docs/benchmarks.md."""
    table = sorted(summaries(rows), key=lambda s: s.speed_up)
    figure, axis = plt.subplots(figsize=(7.5, 0.3 * len(table) + 1.2))
    errors = [[s.speed_up - s.low for s in table], [s.high - s.speed_up for s in table]]
    bars = axis.barh(
        [s.method for s in table],
        [s.speed_up for s in table],
        xerr=errors,
        color=[_colour(s.method) for s in table],
        ecolor="#333333",
    )
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # so that the line at 1 does not strike figures out
    axis.bar_label(bars, [f"{s.speed_up:.2f}x" for s in table], padding=14, fontsize=9, bbox=box)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlim(0, 1.15 * max(s.high for s in table))
    axis.set_xlabel("speed-up over plain decoding (median over prompts, 95% interval)")
    kinds = ((OURS, "Talon"), (BASELINES, "baselines, built in"), (PEERS, "transformers"))
    shown = {_colour(s.method) for s in table}
    patches = [Patch(color=colour, label=kind) for colour, kind in kinds if colour in shown]
    axis.legend(handles=patches, loc="lower right", fontsize=8)
    _save(figure, path)


def accepted_lengths(rows: Sequence[Row], path: Path, most: int = 12) -> None:
    """How many tokens a round emits: the share of rounds, for the contestants that accept most."""
    table = [s for s in summaries(rows) if s.mean_accepted_tokens is not None and s.method != BASELINE]
    best = sorted(table, key=lambda s: -(s.mean_accepted_tokens or 0))[:5]
    figure, axis = plt.subplots(figsize=(7.5, 3.6))
    for place, line in enumerate(best):
        counts: Counter[int] = Counter()
        for row in rows:
            if row.method == line.method:
                counts.update({min(int(length), most): count for length, count in row.accepted.items()})
        total = max(1, sum(counts.values()))
        lengths = range(1, most + 1)
        label = f"{line.method} (mean {line.mean_accepted_tokens:.2f})"
        axis.plot(lengths, [counts[n] / total for n in lengths], **_line(place), label=label)
    axis.set_xlabel(f"tokens emitted in a round (the last: {most} or more)")
    axis.set_ylabel("share of rounds")
    axis.legend(fontsize=8)
    _save(figure, path)


SIZES = (2, 5, 9, 13, 17, 25, 33, 49, 65, 97, 129)


def cost_curve(rows: Sequence[Row], path: Path) -> None:
    """t(n), what a forward of the target over n nodes takes, from every round of every contestant.

    A dot is the median of one answer's rounds over so many nodes; the line goes through the medians of dots whose sizes
    lie between two of `SIZES`.
    """
    seen: dict[int, list[float]] = {}
    for row in rows:
        for size, forward_ms in row.forward_ms.items() or _mean_forward(row):
            seen.setdefault(int(size), []).append(forward_ms)
    figure, axis = plt.subplots(figsize=(7.5, 3.6))
    for nodes, times in seen.items():
        axis.scatter([nodes] * len(times), times, s=6, color=BASELINES, alpha=0.4)
    groups: dict[int, list[tuple[int, float]]] = {}
    for nodes, times in seen.items():
        groups.setdefault(bisect(SIZES, nodes), []).extend((nodes, ms) for ms in times)
    axis.set(xlabel="nodes verified in a forward, n", ylabel="t(n), ms")
    if not seen:  # answers of one token: no round followed
        return _save(figure, path)
    points = [[median(column) for column in zip(*groups[group], strict=True)] for group in sorted(groups)]
    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=OURS, label="median")
    axis.set_ylim(0, 1.15 * float(np.quantile([t for times in seen.values() for t in times], 0.99)))
    if 1 in seen:
        one = median(seen[1])
        right = axis.secondary_yaxis(
            "right", functions=(lambda ms: np.asarray(ms) / one, lambda n: np.asarray(n) * one)
        )
        right.set_ylabel("times t(1)")
    axis.legend(fontsize=8)
    _save(figure, path)


def _mean_forward(row: Row) -> list[tuple[str, float]]:
    """Of rows that do not tell their forwards one by one: the answer's means."""
    return [(str(round(row.nodes)), row.verify_ms)] if row.nodes and row.verify_ms else []


def tree_shapes(
    widths: Mapping[str, Sequence[float]], rounds: Mapping[str, Sequence[Shape]], path: Path, most: int = 16
) -> None:
    """Per suite: the mean tree's width at every depth, how deep trees are, and how many tokens a round emits."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8))
    at = range(1, most + 1)
    for place, (suite, some) in enumerate(rounds.items()):
        style = _line(place) | {"label": suite}
        shown = [*widths[suite], *[0.0] * most][:most]
        left.plot(at, shown, **style)
        for axis, values in ((middle, [r.depth for r in some]), (right, [r.emitted for r in some])):
            counts = Counter(min(value, most) for value in values)
            axis.plot(at, [counts[n] / len(values) for n in at], **style)
    left.set(
        xlabel="depth", ylabel="nodes (mean over rounds)", title="Width per depth", yscale="symlog", ylim=(0, None)
    )
    left.set_yticks([0, 1, 2, 5, 10, 20, 40], ["0", "1", "2", "5", "10", "20", "40"])
    middle.set(xlabel=f"depth of the tree ({most}: or deeper)", ylabel="share of rounds", title="Depth")
    right.set(xlabel=f"tokens emitted ({most}: or more)", ylabel="share of rounds", title="Accepted length")
    for axis in (left, middle, right):
        axis.set_xticks(range(0, most + 1, 2))
    left.legend(fontsize=9)
    _save(figure, path)


def growth_figure(
    grown: Sequence[Grown], speeds: Mapping[tuple[str, str], float], of_position: int, path: Path
) -> None:
    """TALON's experiments: gate, budget, ungated layers, KV memory, a head that is too sure, and suite by suite."""
    figure, axes = plt.subplots(2, 3, figsize=(14, 7.6))
    flat = list(axes.flat)
    for axis, (group, title) in zip(
        flat, (("mu", "Gate mu"), ("N", "Budget N"), ("k", "Ungated layers k")), strict=False
    ):
        mine = [g for g in grown if g.group == group]
        _two_scales(axis, [g.value for g in mine], mine, [speeds[g.group, g.value] for g in mine])
        axis.set(title=title, xlabel=group)
    memory, sure, suites = flat[3:]
    fixed = [g for g in grown if g.group == "policy"]
    for place, g in enumerate(fixed):
        marker = MARKERS[place % len(MARKERS)]
        colour = COLOURS[place % len(COLOURS)]
        kib = g.mean("nodes") * of_position / 1024
        memory.plot(kib, g.mean("emitted"), marker, color=colour, label=g.value, markersize=8)
    memory.set(title="KV memory of a round's tree", xlabel="KiB (mean)", ylabel="MAT")
    memory.legend(fontsize=8)
    heads = [g for g in grown if g.group == "head"]
    at = np.arange(len(heads))
    sure.barh(at + 0.2, [g.mean("emitted") for g in heads], 0.4, color=OURS, label="MAT")
    sure.barh(at - 0.2, [g.mean("promised") for g in heads], 0.4, color=PEERS, hatch="//", label="promised")
    sure.set_yticks(at, [g.value for g in heads], fontsize=8)
    sure.invert_yaxis()
    sure.set(title="A head too sure at depth", xlabel="tokens a round")
    sure.legend(fontsize=8)
    names = list(dict.fromkeys(r.suite for g in fixed for r in g.rounds))
    for place, g in enumerate(fixed):
        suites.plot(names, [g.mean("emitted", name) for name in names], **_line(place), label=g.value)
    suites.set(title="MAT by suite", ylim=(0, None))
    suites.tick_params(axis="x", labelrotation=30, labelsize=8)
    _save(figure, path)


def _two_scales(axis: Any, values: Sequence[str], mine: Sequence[Grown], speeds: Sequence[float]) -> None:
    """MAT on the left, tokens per second on the right, over what is varied."""
    axis.plot(values, [g.mean("emitted") for g in mine], "o-", color=OURS)
    axis.set_ylabel("MAT", color=OURS)
    right = axis.twinx()
    right.plot(values, speeds, "s--", color=PEERS)
    right.set_ylabel("tokens/s", color=PEERS)


def tree_sizes(rows: Sequence[Row], path: Path) -> None:
    """Nodes and depth of the trees verified, suite by suite."""
    suites = list(dict.fromkeys(row.suite for row in rows))
    methods = [m for m in ("talon", "hybrid", "talon-tree", "eagle2", "suffix") if any(r.method == m for r in rows)]
    names = [name for name in ("nodes", "depth") if any(getattr(row, name) for row in rows)] or ["nodes"]
    figure, axes = plt.subplots(1, len(names), figsize=(5.5 * len(names), 3.4), squeeze=False)
    width = 0.8 / max(1, len(methods))
    for axis, name in zip(axes[0], names, strict=True):
        for place, method in enumerate(methods):
            heights = []
            for suite in suites:
                known = [getattr(row, name) for row in rows if row.method == method and row.suite == suite]
                heights.append(sum(value or 0 for value in known) / max(1, len(known)))
            at = [x + place * width for x in range(len(suites))]
            axis.bar(at, heights, width, color=COLOURS[place], hatch=HATCHES[place], edgecolor="white", label=method)
        axis.set_xticks([x + 0.4 - width / 2 for x in range(len(suites))], suites)
        axis.set_ylabel(f"{name} verified a round")
        axis.margins(y=0.25)
    if methods:
        axes[0][0].legend(ncols=3, fontsize=8, loc="upper left")
    _save(figure, path)


def reliability(sources: Mapping[str, NDArray[np.float64]], path: Path) -> None:
    """Promised against observed acceptance, a panel for each source; below, how many nodes were promised that much.

    sources: name -> [bins, 3], as `Reliability.by_source` gives it.
    """
    columns = min(4, len(sources))
    lines = -(-len(sources) // columns)
    figure, axes = plt.subplots(
        2 * lines, columns, figsize=(3.2 * columns, 4.2 * lines), squeeze=False, sharex=True,
        gridspec_kw={"height_ratios": [3, 1] * lines},
    )  # fmt: skip
    for place in range(lines * columns):
        above, below = axes[2 * (place // columns)][place % columns], axes[2 * (place // columns) + 1][place % columns]
        if place >= len(sources):
            above.axis("off")
            below.axis("off")
            continue
        name, bins = list(sources.items())[place]
        promised, accepted, seen = bins.T
        observed = accepted / seen
        error = 1.96 * np.sqrt((observed * (1 - observed) + 1 / seen) / seen)
        gap = float(np.abs(promised - accepted).sum() / seen.sum())
        above.plot([0, 1], [0, 1], color="#999999", linewidth=0.8)
        above.errorbar(promised / seen, observed, error, color=OURS, marker="o", markersize=4, linewidth=1)
        above.set(title=f"{name}\n{int(seen.sum()):,} nodes, mean gap {gap:.3f}", xlim=(0, 1), ylim=(0, 1))
        above.title.set_fontsize(9)
        below.bar(promised / seen, seen, width=0.06, color=BASELINES)
        below.set(yscale="log", ylim=(0.8, 2 * seen.max()), xlabel="promised chance")
        if place % columns == 0:
            above.set_ylabel("observed acceptance")
            below.set_ylabel("nodes")
    _save(figure, path)


def forward_bars(profile: Profile, path: Path) -> None:
    """What a forward spends its time on, a bar for each number of rows, and the machine's limits across the bars."""
    figure, axis = plt.subplots(figsize=(8.5, 4.2))
    places = np.arange(len(profile.forwards))
    bottom = np.zeros(len(places))
    for index, part in enumerate(("products", "attention", "other", "gaps")):
        heights = np.array([getattr(forward, f"{part}_ms") for forward in profile.forwards])
        looks: dict[str, Any] = {"color": COLOURS[index], "hatch": HATCHES[index], "edgecolor": "white"}
        axis.bar(places, heights, 0.6, bottom, label="gaps (Python)" if part == "gaps" else part, **looks)
        bottom += heights
    for place, height in zip(places, bottom, strict=True):
        axis.annotate(f"{height:.3g}", (place, height), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    memory = f"limit of memory:\n{profile.read_gb_per_s:.3g} GB/s"
    arithmetic = f"limit of arithmetic:\n{profile.multiply_adds_per_s:.2g} multiply-adds/s"
    left, right = places - 0.42, places + 0.42
    limits = [forward.memory_ms for forward in profile.forwards]
    axis.hlines(limits, left, right, "black", "-", linewidth=1.8, label=memory)
    limits = [forward.arithmetic_ms for forward in profile.forwards]
    axis.hlines(limits, left, right, "black", "--", linewidth=1.8, label=arithmetic)
    axis.set_xticks(places, [str(forward.rows) for forward in profile.forwards])
    title = f"{profile.model}, {profile.dtype}, {profile.device}, threads: {profile.threads}, {profile.forward}"
    axis.set_title(title, fontsize=9, loc="left")
    axis.set(xlabel=f"rows of a forward behind {profile.behind} tokens", ylabel="ms", xlim=(-0.6, len(places) - 0.4))
    axis.margins(y=0.1)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False)
    _save(figure, path)


def concurrency(lines: Sequence[Level], path: Path) -> None:
    """Tokens a second of all requests together over how many there are at once, a line for each method."""
    figure, axis = plt.subplots(figsize=(7.5, 3.8))
    for place, method in enumerate(dict.fromkeys(line.method for line in lines)):
        mine = [line for line in lines if line.method == method]
        at, speeds = [line.concurrency for line in mine], [line.tokens_per_second for line in mine]
        axis.plot(at, speeds, **_line(place), label=method)
    at_once = sorted({line.concurrency for line in lines})
    axis.set_xscale("log", base=2)
    axis.set_xticks(at_once, [str(level) for level in at_once])
    axis.set(xlabel="requests at once", ylabel="tokens/s, all together", ylim=(0, None))
    axis.legend(fontsize=9)
    _save(figure, path)


def engines(turns: Sequence[Turn], path: Path) -> None:
    """Tokens a second in all of Talon's methods and other engines, a panel for each number of requests at once."""
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
    _save(figure, path)


def _line(place: int) -> dict[str, Any]:
    """How the line of that place looks: colour, dashes and marks of its own."""
    looks = {"color": COLOURS[place % 7], "linestyle": LINES[place % 4], "marker": MARKERS[place % 5]}
    return looks | {"markersize": 4}


def _colour(method: str) -> str:
    return OURS if method.startswith(_OURS) else PEERS if method.startswith("hf") else BASELINES


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)

"""Pictures of trees: their shapes, and their promised and observed acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from .figures import BASELINE, Row, summaries, tokens_a_round
from .plot_style import COLOURS, HATCHES, MARKERS, OURS, PEERS, line_style, save
from .records import Accepted, Grown, Shape, simulation


def accepted_lengths(rows: Sequence[Row], path: Path, most: int = 12) -> None:
    """Share of rounds by tokens emitted, for the contestants that accept most."""
    table = [s for s in summaries(rows) if s.mean_accepted_tokens is not None and s.method != BASELINE]
    best = sorted(table, key=lambda s: -(s.mean_accepted_tokens or 0))[:5]
    figure, axis = plt.subplots(figsize=(7.5, 3.6))
    for place, line in enumerate(best):
        mine, counts = [row for row in rows if row.method == line.method], Counter[int]()
        for row in mine:
            for length, count in row.accepted.items():
                counts[min(int(length), most)] += count
        lengths = range(1, most + 1)
        label = f"{line.method} (mean {tokens_a_round(mine):.2f})"
        axis.plot(lengths, [counts[n] / counts.total() for n in lengths], **line_style(place), label=label)
    axis.set_xlabel(f"tokens emitted in a round (the last: {most} or more)")
    axis.set_ylabel("share of rounds")
    axis.legend(fontsize=8)
    save(figure, path)


def tree_shapes(
    widths: Mapping[str, Sequence[float]], rounds: Mapping[str, Sequence[Shape]], path: Path, most: int = 16
) -> None:
    """Per suite: the mean tree's width at every depth, how deep trees are, and how many tokens a round emits."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8))
    at = range(1, most + 1)
    for place, (suite, some) in enumerate(rounds.items()):
        style = line_style(place) | {"label": suite}
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
    save(figure, path)


def tree_sizes(rows: Sequence[Row], path: Path) -> None:
    """Nodes and depth of the trees verified, suite by suite, for the fastest contestants that draft."""
    suites = list(dict.fromkeys(row.suite for row in rows))
    methods = drafting(rows)[: len(HATCHES)]
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
    axes[0][0].legend(ncols=3, fontsize=8, loc="upper left")
    save(figure, path)


def drafting(rows: Sequence[Row]) -> list[str]:
    """The contestants whose trees are known, the fastest first."""
    known = {row.method for row in rows if row.nodes is not None and row.method != BASELINE}
    return [line.method for line in sorted(summaries(rows), key=lambda s: -s.speed_up) if line.method in known]


def acceptance_figure(found: Sequence[Accepted], path: Path) -> None:
    """For each temperature what chains accept at each position, if there are any, tokens a round of chain and tree, and
    cut trees' speed-up.
    """
    temperatures = list(dict.fromkeys(one.temperature for one in found))
    ways = [way for way in ("chain", "tree", "cut") if any(one.way == way for one in found)]
    columns = 2 + ("chain" in ways)
    size = (4.7 * columns, 3.8 * len(temperatures))
    figure, axes = plt.subplots(len(temperatures), columns, figsize=size, squeeze=False)
    for row, temperature in zip(axes, temperatures, strict=True):
        mine = [one for one in found if one.temperature == temperature]
        if "chain" in ways:
            _draw_chains(row[0], [one for one in mine if one.way == "chain"])
        _draw_tokens(row[-2], mine, ways)
        cut = [one for one in mine if one.way == "cut"]
        row[-1].bar([one.method for one in cut], [one.speed_up for one in cut], color=OURS)
        row[-1].axhline(1, color="black", linewidth=0.8)
        title = f"Cut to what pays: computed speed-up, T = {temperature:g}{simulation(found)}"
        row[-1].set_title(title, fontsize=8)
        for axis in row[-2:]:
            axis.tick_params(axis="x", labelrotation=30, labelsize=8)
    save(figure, path)


def _draw_chains(axis: Axes, chains: Sequence[Accepted]) -> None:
    for place, one in enumerate(chains):
        shares = one.by_position()
        axis.plot(range(1, len(shares) + 1), shares, **line_style(place), label=one.method)
    axis.set(title=f"Chain, T = {chains[0].temperature:g}", ylim=(0, 1))
    axis.set(xlabel="position", ylabel="accepted, given all before")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(fontsize=8)


def _draw_tokens(axis: Axes, found: Sequence[Accepted], ways: Sequence[str]) -> None:
    """Tokens a round of every method in each of the ways."""
    methods, width = list(dict.fromkeys(one.method for one in found)), 0.81 / len(ways)
    for place, way in enumerate(ways):
        beside = width * (place - (len(ways) - 1) / 2)
        bars = {methods.index(one.method) + beside: one.mat for one in found if one.way == way}
        looks: dict[str, Any] = {"color": COLOURS[place], "hatch": HATCHES[place], "edgecolor": "white"}
        axis.bar([*bars], [*bars.values()], width, label=way, **looks)
    axis.set(title=f"Tokens a round, T = {found[0].temperature:g}", ylim=(1, None))
    axis.set_xticks(range(len(methods)), methods)
    axis.legend(fontsize=8)


def growth_figure(
    grown: Sequence[Grown], speeds: Mapping[tuple[str, str], float], of_position: int, path: Path
) -> None:
    """TALON's experiments: gate, budget, ungated layers, KV memory, an overconfident head, and suite by suite."""
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
        suites.plot(names, [g.mean("emitted", name) for name in names], **line_style(place), label=g.value)
    suites.set(title="MAT by suite")
    suites.set_ylim(0, 1.08 * suites.get_ylim()[1])
    suites.legend(fontsize=8)
    suites.tick_params(axis="x", labelrotation=30, labelsize=8)
    save(figure, path)


def _two_scales(axis: Any, values: Sequence[str], mine: Sequence[Grown], speeds: Sequence[float]) -> None:
    """MAT on the left axis, tokens per second on the right, against the varied parameter."""
    axis.plot(values, [g.mean("emitted") for g in mine], "o-", color=OURS)
    axis.set_ylabel("MAT", color=OURS)
    right = axis.twinx()
    right.plot(values, speeds, "s--", color=PEERS)
    right.set_ylabel("tokens/s", color=PEERS)

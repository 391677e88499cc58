"""Pictures of how long a forward of the target takes."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from .figures import Row
from .plot_style import BASELINES, COLOURS, HATCHES, OURS, save
from .records import Profile

SIZES = (2, 5, 9, 13, 17, 25, 33, 49, 65, 97, 129)


def cost_curve(rows: Sequence[Row], path: Path) -> None:
    """t(n), the time of a forward of the target over n nodes, from every round of every contestant.

    A dot is the median of one answer's rounds over n nodes; the line goes through the medians of dots whose sizes
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
        return save(figure, path)
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
    save(figure, path)


def _mean_forward(row: Row) -> list[tuple[str, float]]:
    """The answer's means, for rows that do not list their forwards one by one."""
    return [(str(round(row.nodes)), row.verify_ms)] if row.nodes and row.verify_ms else []


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
    integers = profile.activations == "int8"
    limits = [f.int8_ms if integers and f.int8_ms is not None else f.arithmetic_ms for f in profile.forwards]
    axis.hlines(limits, left, right, "black", "--", linewidth=1.8, label=arithmetic)
    axis.set_xticks(places, [str(forward.rows) for forward in profile.forwards])
    title = f"{profile.model}, {profile.dtype}, {profile.device}, threads: {profile.threads}, {profile.forward}"
    axis.set_title(title, fontsize=9, loc="left")
    axis.set(xlabel=f"rows of a forward behind {profile.behind} tokens", ylabel="ms", xlim=(-0.6, len(places) - 0.4))
    axis.margins(y=0.1)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False)
    save(figure, path)

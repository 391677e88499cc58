"""`talon shapes`: how deep and wide a drafter's trees are, text by text, and how far the target follows them.

The target and the drafter run in this process, one after the other, without workers: trees are measured, not times.
Trees are counted as drafted; the verifier cuts nothing from the trees of an uncalibrated head.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from drafters.registry import build
from engine.config import Config
from engine.core.drafter_protocol import Verdict
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.model.target import Target

from ..report.figures import loops
from ..report.records import Shape
from .known_answers import answer


class Shaped(msgspec.Struct, frozen=True):
    """One answer."""

    suite: str
    loops: bool
    rounds: list[Shape]


def shape_of(verdict: Verdict) -> Shape:
    return Shape(np.bincount(verdict.tree.depths)[1:].tolist(), len(verdict.tokens))


def measure(
    config: Config, suites: dict[str, list[list[int]]], sampling: SamplingParams, console: Console
) -> list[Shaped]:
    """The trees of every answer. A prompt that would leave the deepest tree no room in the context is left out."""
    target = Target.of_config(config)
    drafter, budget, answers = build(config), config.drafter.budget, []
    with console.status("") as status:
        for suite, prompts in suites.items():
            for number, prompt in enumerate(prompts, start=1):
                status.update(f"{suite} {number}/{len(prompts)}")
                if len(prompt) + sampling.max_tokens + budget > target.context:
                    console.print(f"left out: {suite} {number}: {len(prompt)} tokens are too many for this target")
                    continue
                verdicts = list(answer(target, drafter, prompt, sampling, budget))
                tokens = [token for verdict in verdicts for token in verdict.tokens]
                answers.append(Shaped(suite, loops(tokens), [shape_of(verdict) for verdict in verdicts[1:]]))
    return answers


def mean_widths(rounds: Sequence[Shape]) -> list[float]:
    """Nodes at depth 1, 2, ... of the mean tree."""
    widths = np.zeros((len(rounds), max((r.depth for r in rounds), default=0)))
    for row, round_ in zip(widths, rounds, strict=True):
        row[: round_.depth] = round_.widths
    return [float(width) for width in widths.mean(axis=0)]


def table(answers: Sequence[Shaped], title: str) -> Table:
    """Means over the rounds of each suite. below 1: nodes per layer after the first, whose width is fixed."""
    lines = Table(title=title)
    for column in ("suite", "answers", "rounds", "nodes", "depth", "depth p10-p90", "width below 1", "MAT"):
        lines.add_column(column, justify="left" if column == "suite" else "right")
    for suite in dict.fromkeys(a.suite for a in answers):
        mine = [a for a in answers if a.suite == suite]
        rounds = [round_ for a in mine for round_ in a.rounds]
        deep = [r for r in rounds if r.depth > 1]
        low, high = np.quantile([r.depth for r in rounds], [0.1, 0.9])
        lines.add_row(
            suite,
            str(len(mine)),
            str(len(rounds)),
            f"{mean(r.nodes for r in rounds):.1f}",
            f"{mean(r.depth for r in rounds):.1f}",
            f"{low:.0f}-{high:.0f}",
            f"{mean(sum(r.widths[1:]) / (r.depth - 1) for r in deep):.1f}" if deep else "-",
            f"{mean(r.emitted for r in rounds):.2f}",
        )
    return lines


def draw(answers: Sequence[Shaped], out: Path) -> None:
    try:
        from ..report.tree_plots import tree_shapes
    except ImportError as error:
        raise ConfigError(f"no picture: {error}; pip install 'talon-decoding[bench]'") from None
    rounds: dict[str, list[Shape]] = {}
    for a in answers:
        rounds.setdefault(a.suite, []).extend(a.rounds)
    tree_shapes({suite: mean_widths(some) for suite, some in rounds.items()}, rounds, out)

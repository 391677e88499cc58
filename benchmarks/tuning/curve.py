"""The training curve as a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ..report.plots import lines, panels, save


def draw_curve(points: Path, picture: Path) -> None:
    """Draw a run's held-out scores: tokens a round over the minutes of training, and what is accepted at each position
    at its beginning, in its middle and at its end. points: the run's `CURVE`.
    """
    curve = [(seconds / 60, accepted) for _, seconds, accepted in json.loads(points.read_text(encoding="utf8"))]
    minutes = [at for at, _ in curve]
    rounds = [1 + sum(math.prod(accepted[: k + 1]) for k in range(len(accepted))) for _, accepted in curve]
    figure, ((left, right),) = panels(1, 2, 10, 3.6)
    lines(left, {"held-out prompts": (minutes, rounds)}, xlabel="minutes of training", ylabel="tokens a round, chain")
    left.set(xlim=(0, None), ylim=(1, None))
    shown = {f"after {at:.1f} min": accepted for at, accepted in (curve[0], curve[len(curve) // 2], curve[-1])}
    by_position = {label: (range(1, len(accepted) + 1), accepted) for label, accepted in shown.items()}
    lines(right, by_position, xlabel="position", ylabel="accepted, given all before", ylim=(0, 1))
    right.set_xticks(range(1, len(curve[-1][1]) + 1))
    save(figure, picture)

"""Should speculation be on, which method drafts, and what does each kind of activations give?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from .figures import PLAIN, Row, Summary, summaries
from .tables import known

SERVED = {"talon-pld": "pld", "talon-suffix": "suffix", "hybrid": "hybrid"}
"""The contestants that run as Talon serves them, and the method of each."""


def recommendation(rows: Sequence[Row], options: Sequence[str]) -> str:
    """Return a sentence with its figures, and the line to paste. A method is recommended only if its whole interval is
    above plain decoding's speed. options: of the command line that say what was measured, and are to be pasted too.
    """
    served = [one for one in summaries(rows) if one.method in SERVED]
    best = next((one for one in served if one.low > 1.0), None)
    questions = len({(row.suite, row.question_id) for row in rows})
    if best is None:
        tried = f": at best {_figures(served[0])}" if served else ""
        told = f"Leave speculation off: no method was surely faster than plain decoding{tried}, {questions} prompts."
        return f"{told}\n{_line(options, PLAIN)}"
    told = f"Turn speculation on with {_figures(best)}, {questions} prompts; texts as without: {best.same_text}."
    return f"{told}\n{_line(options, SERVED[best.method])}"


def activations_told(chosen: Sequence[Row], others: Sequence[Row]) -> str:
    """Say what both kinds of activations give. chosen: the rows of `activations=auto`; others: of the other kind."""
    kinds = [(rows[0].activations, _speeds(rows)) for rows in (chosen, others)]
    (auto, first), (other, second) = kinds
    return (
        f"activations=auto is {auto} here: {first}. {other}: {second}; to take that, add --set activations={other}: "
        "plain decoding's own text is then a slightly different one."
    )


def _speeds(rows: Sequence[Row]) -> str:
    names = {PLAIN: "plain"} | SERVED
    speeds = [(names[one.method], one.mean("tokens_per_second")) for one in summaries(rows)]
    return ", ".join(f"{name} {known(speed, '.1f')}" for name, speed in speeds) + " tokens/s"


def _figures(one: Summary) -> str:
    return f"{SERVED[one.method]}, {one.speed_up:.2f}x plain decoding (95%: {one.low:.2f} to {one.high:.2f})"


def _line(options: Sequence[str], method: str) -> str:
    return shlex.join(["talon", "serve", *options, "--method", method])

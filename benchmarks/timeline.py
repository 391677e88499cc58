"""`talon timeline`: a trace drawn as two swim lanes, to show what overlaps and what waits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.errors import ConfigError, TalonError
from engine.messages import Span
from engine.trace import Timeline

COLOURS = {
    "prefill": "#CC79A7",
    "verify": "#0072B2",
    "draft": "#E69F00",
    "draft ahead": "#F0E442",
    "sync": "#009E73",
    "sync (miss)": "#D55E00",
}
EXCERPT_S = 0.6


def timeline(
    trace: Annotated[Path, typer.Argument(help="What talon generate --trace wrote.")],
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("timeline.png"),
    from_s: Annotated[float | None, typer.Option(help="Seconds from the first span.", show_default="decoding")] = None,
    to_s: Annotated[float | None, typer.Option(help="Seconds from the first span.", show_default="0.6 s on")] = None,
) -> None:
    """Draw a trace: what verifier and drafter did when."""
    try:
        draw(Timeline.read(trace), out, from_s, to_s)
        typer.echo(f"picture: {out}")
    except TalonError as error:
        typer.echo(f"talon: {error}", err=True)
        raise typer.Exit(2) from None


def draw(timeline: Timeline, out: Path, from_s: float | None = None, to_s: float | None = None) -> None:
    """Draw the spans between two times; by default, an excerpt that begins with the first round."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError("talon timeline draws with matplotlib: pip install 'talon-decoding[bench]'") from None
    spans = [span for lane in timeline.lanes.values() for span in lane]
    if not spans:
        raise ConfigError("trace: holds no spans: generate with --trace and a few more tokens")
    zero_us = min(span.start_us for span in spans)
    rounds = [span.start_us for span in spans if span.name == "verify"] or [zero_us]
    begin = from_s if from_s is not None else (min(rounds) - zero_us) / 1e6
    end = to_s if to_s is not None else begin + EXCERPT_S
    figure = Figure(figsize=(12, 2.6))
    axis = figure.add_subplot()
    lanes = sorted(timeline.lanes, reverse=True)  # the verifier on top
    for place, worker in enumerate(reversed(lanes)):
        for span in timeline.lanes[worker]:
            at = (span.start_us - zero_us) / 1e6
            if at < end and at + span.duration_us / 1e6 > begin:
                axis.barh(place, span.duration_us / 1e6, left=at, height=0.7, color=_colour(span), edgecolor="white")
    axis.set_yticks(range(len(lanes)), list(reversed(lanes)))
    axis.set_xlim(begin, end)
    axis.set_xlabel("seconds")
    axis.set_title(timeline.title, loc="left")
    seen = [name for name in COLOURS if any(span.name == name for span in spans)]
    handles = [Patch(color=COLOURS[name], label=name) for name in seen]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(out, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"out={out}: cannot be written ({error}): give another file, .png or .svg") from None


def _colour(span: Span) -> str:
    return COLOURS.get(span.name, "#999999")

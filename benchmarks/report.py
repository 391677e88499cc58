"""report.md and report.html: what was run, on what, and what came of it. The page holds its pictures."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from pathlib import Path

from . import plots
from .about import ABOUT
from .figures import Row, Summary, read_rows, summaries, without_loops

PICTURES = (
    ("speed-up.png", "Speed-up over all suites", plots.summary_bars),
    ("suites.png", "Speed-up per suite", plots.speed_up_bars),
    ("accepted.png", "Tokens emitted in a round", plots.accepted_lengths),
    ("cost.png", "Cost curve of the target", plots.cost_curve),
    ("trees.png", "Size and depth of the trees", plots.tree_sizes),
)
IF_DRAWN = (
    ("tree-shapes.png", "Shape of the trees (talon shapes)"),
    ("timeline.png", "Both workers at once (talon timeline)"),
    ("calibration.png", "Promised and observed acceptance (talon bench --calibration)"),
)
"""Pictures that other commands leave in the folder, or may not."""
READING = (
    "Speed-up: median over prompts of tokens/s over plain decoding's on the same prompt in the same run, with the 95% "
    "interval by bootstrap. MAT: tokens a round, bonus included. An answer loops if 8 tokens in a row occur in it more "
    "than 4 times; loops flatter whoever copies from the text. Contestants take turns prompt by prompt.",
    "Token ms: between tokens, those that come together sharing their wait. Round ms: between verdicts, the wait a "
    "reader of the stream sees. Verify and draft: models' forwards; other: the rest of a round, messages included. "
    "Peak MB: resident memory of verifier and drafter, libraries included. Same text: as plain decoding's; a tie is a "
    "difference that rounding decides, found by a float32 forward.",
)
Cells = list[list[str]]
Section = tuple[str, list[Cells]]
"""A title and its tables."""
Column = Callable[[Summary], str]


def _shown(name: str, form: str, scale: float = 1.0) -> Column:
    def cell(summary: Summary) -> str:
        value = getattr(summary, name)
        return "-" if value is None else format(value * scale, form)

    return cell


SPEED: dict[str, Column] = {
    "method": lambda s: s.method,
    "tokens/s": _shown("tokens_per_second", ".1f"),
    "speed-up": lambda s: f"{s.speed_up:.2f}x",
    "95%": lambda s: f"{s.low:.2f}-{s.high:.2f}",
    "MAT": _shown("mean_accepted_tokens", ".2f"),
    "first token ms": _shown("time_to_first_token_s", ".0f", 1000),
    "token ms p50": _shown("token_ms_p50", ".1f"),
    "p95": _shown("token_ms_p95", ".1f"),
    "peak MB": _shown("peak_memory_mb", ".0f"),
    "same text": lambda s: s.same_text,
}
ROUNDS: dict[str, Column] = {
    "method": lambda s: s.method,
    "round ms p50": _shown("round_ms_p50", ".1f"),
    "p95": _shown("round_ms_p95", ".1f"),
    "verify ms": _shown("verify_ms", ".1f"),
    "draft ms": _shown("draft_ms", ".1f"),
    "other ms": _shown("other_ms", ".1f"),
    "nodes": _shown("nodes", ".0f"),
    "depth": _shown("depth", ".1f"),
    "busy": _shown("verifier_busy", ".0%"),
    "hits": _shown("draft_hit_rate", ".0%"),
}
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:13px}td,th{padding:.25em .6em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}table{margin-bottom:1.2em}img{max-width:100%}h2{margin-top:2em}"""


def write(folder: Path) -> None:
    """Write the report of `folder`/results.jsonl beside it."""
    rows = read_rows(folder / "results.jsonl")
    greedy = [row for row in rows if row.temperature == 0] or rows
    for name, _, draw in PICTURES:
        draw(greedy, folder / name)
    sections = _sections(rows)
    pictures = [(name, title) for name, title, _ in PICTURES]
    pictures += [(name, title) for name, title in IF_DRAWN if (folder / name).exists()]
    (folder / "report.md").write_text(_markdown(_about(folder), sections, pictures), encoding="utf8")
    (folder / "report.html").write_text(_page(folder, sections, pictures), encoding="utf8")


def _sections(rows: Sequence[Row]) -> list[Section]:
    """For every temperature: all prompts, those without loops, and suite by suite."""
    sections = []
    for temperature in sorted({row.temperature for row in rows}):
        some = [row for row in rows if row.temperature == temperature]
        sections.append(_section(f"T = {temperature:g}, all prompts", some))
        straight = without_loops(some)
        share = (
            f"{len({(r.suite, r.question_id) for r in straight})} of {len({(r.suite, r.question_id) for r in some})}"
        )
        if straight:
            sections.append(
                _section(f"T = {temperature:g}, prompts whose plain answer does not loop ({share})", straight)
            )
        for suite in dict.fromkeys(row.suite for row in some):
            sections.append(_section(f"T = {temperature:g}, {suite}", [row for row in some if row.suite == suite]))
    return sections


def _section(title: str, rows: Sequence[Row]) -> Section:
    """The contestants, fastest first: what a user sees of them, then what their rounds are made of."""
    lines = sorted(summaries(rows), key=lambda s: -s.speed_up)
    made_of_rounds = [s for s in lines if s.round_ms_p50 is not None]
    return title, [_table(lines, SPEED), _table(made_of_rounds, ROUNDS)]


def _table(lines: Sequence[Summary], columns: dict[str, Column]) -> Cells:
    return [list(columns), *([cell(line) for cell in columns.values()] for line in lines)]


def _about(folder: Path) -> list[str]:
    """What was run and how to read it. The machine is the one that ran it, which need not be this one."""
    try:
        run = (folder / ABOUT).read_text(encoding="utf8").splitlines()
    except OSError:
        run = ["Machine: not recorded with these rows."]
    return [*run, *READING]


def _markdown(about: Sequence[str], sections: Sequence[Section], pictures: Sequence[tuple[str, str]]) -> str:
    parts = ["# Benchmark", *about]
    parts += [f"![{title}]({name})" for name, title in pictures]
    for title, tables in sections:
        parts.append(f"## {title}")
        for head, *lines in tables:
            cells = [head, ["---"] + ["---:"] * (len(head) - 1), *lines]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
    return "\n\n".join(parts) + "\n"


def _page(folder: Path, sections: Sequence[Section], pictures: Sequence[tuple[str, str]]) -> str:
    parts = [f"<p>{html.escape(line)}</p>" for line in _about(folder)]
    for name, title in pictures:
        data = base64.b64encode((folder / name).read_bytes()).decode()
        parts.append(
            f'<h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'
        )
    for title, tables in sections:
        parts.append(f"<h2>{html.escape(title)}</h2>")
        for head, *lines in tables:
            row = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
            body = "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines
            )
            parts.append(f"<table><tr>{row}</tr>{body}</table>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Talon benchmark</title><style>{_STYLE}</style>'
        f"<h1>Talon benchmark</h1>{''.join(parts)}</html>\n"
    )

"""report.md and report.html: what was run, on what, and what came of it. The page holds its pictures."""

from __future__ import annotations

import base64
import html
import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plots
from benchmarks.figures import Row, Summary, read_rows, summaries, without_loops
from engine.config import cores

PICTURES = (
    ("speed-up.png", "Speed-up over all suites", plots.summary_bars),
    ("suites.png", "Speed-up per suite", plots.speed_up_bars),
    ("accepted.png", "Tokens emitted in a round", plots.accepted_lengths),
    ("cost.png", "Cost of verification", plots.verification_cost),
    ("trees.png", "Size of the trees", plots.tree_sizes),
)
TIMELINE = "timeline.png"
COLUMNS = (
    "method", "tokens/s", "speed-up", "95%", "MAT", "first token ms", "round ms p50", "p95", "verify ms", "draft ms",
    "nodes", "busy", "hits", "same text",
)  # fmt: skip
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:13px}td,th{padding:.25em .6em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}img{max-width:100%}h2{margin-top:2em}"""


def write(folder: Path) -> None:
    """Write the report of `folder`/results.jsonl beside it."""
    rows = read_rows(folder / "results.jsonl")
    greedy = [row for row in rows if row.temperature == 0] or rows
    for name, _, draw in PICTURES:
        draw(greedy, folder / name)
    sections = _sections(rows)
    pictures = [(name, title) for name, title, _ in PICTURES]
    if (folder / TIMELINE).exists():
        pictures.append((TIMELINE, "Both workers at once"))
    (folder / "report.md").write_text(_markdown(sections, pictures), encoding="utf8")
    (folder / "report.html").write_text(_page(folder, sections, pictures), encoding="utf8")


def _sections(rows: Sequence[Row]) -> list[tuple[str, list[list[str]]]]:
    """(title, table) for every temperature: all prompts, those without loops, and suite by suite."""
    sections = []
    for temperature in sorted({row.temperature for row in rows}):
        some = [row for row in rows if row.temperature == temperature]
        sections.append((f"T = {temperature:g}, all prompts", _table(some)))
        straight = without_loops(some)
        share = (
            f"{len({(r.suite, r.question_id) for r in straight})} of {len({(r.suite, r.question_id) for r in some})}"
        )
        if straight:
            sections.append(
                (f"T = {temperature:g}, prompts whose plain answer does not loop ({share})", _table(straight))
            )
        for suite in dict.fromkeys(row.suite for row in some):
            sections.append((f"T = {temperature:g}, {suite}", _table([row for row in some if row.suite == suite])))
    return sections


def _table(rows: Sequence[Row]) -> list[list[str]]:
    return [list(COLUMNS), *(_line(summary) for summary in summaries(rows))]


def _line(s: Summary) -> list[str]:
    def shown(value: float | None, form: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(value * scale, form)

    return [
        s.method,
        f"{s.tokens_per_second:.1f}",
        f"{s.speed_up:.2f}x",
        f"{s.low:.2f}-{s.high:.2f}",
        shown(s.mean_accepted_tokens, ".2f"),
        shown(s.time_to_first_token_s, ".0f", 1000),
        shown(s.round_ms_p50, ".1f"),
        shown(s.round_ms_p95, ".1f"),
        shown(s.verify_ms, ".1f"),
        shown(s.draft_ms, ".1f"),
        shown(s.nodes, ".0f"),
        shown(s.verifier_busy, ".0%"),
        shown(s.draft_hit_rate, ".0%"),
        f"{s.equal}/{s.compared}" if s.compared else "-",
    ]


def _machine() -> list[str]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "numpy"))
    return [
        f"Machine: {_processor()}, {cores()} cores, {platform.system()}",
        f"Versions: Python {platform.python_version()}, {versions}",
        "Speed-up: median over prompts of tokens/s over plain decoding's on the same prompt in the same run, with the "
        "95% interval by bootstrap. MAT: tokens a round, bonus included. An answer loops if 8 tokens in a row occur in "
        "it more than 4 times; loops flatter whoever copies from the text. Contestants take turns prompt by prompt.",
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _markdown(sections: Sequence[tuple[str, list[list[str]]]], pictures: Sequence[tuple[str, str]]) -> str:
    parts = ["# Benchmark", *_machine()]
    parts += [f"![{title}]({name})" for name, title in pictures]
    for title, (head, *lines) in sections:
        table = [head, ["---"] + ["---:"] * (len(head) - 1), *lines]
        parts += [f"## {title}", "\n".join(f"| {' | '.join(line)} |" for line in table)]
    return "\n\n".join(parts) + "\n"


def _page(folder: Path, sections: Sequence[tuple[str, list[list[str]]]], pictures: Sequence[tuple[str, str]]) -> str:
    parts = [f"<p>{html.escape(line)}</p>" for line in _machine()]
    for name, title in pictures:
        data = base64.b64encode((folder / name).read_bytes()).decode()
        parts.append(
            f'<h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'
        )
    for title, (head, *lines) in sections:
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
        row = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        parts.append(f"<h2>{html.escape(title)}</h2><table><tr>{row}</tr>{body}</table>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Talon benchmark</title><style>{_STYLE}</style>'
        f"<h1>Talon benchmark</h1>{''.join(parts)}</html>\n"
    )

"""Writes report.md and report.html: what was run, on which machine, and all results. The page contains its pictures."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import engine_figures, load_figures, plots, qa_figures
from .about import ABOUT
from .figures import Row, first_turns, round_table, speed_table, turn_table, without_loops
from .runs import Run
from .tables import Table

HEADLINE = "headline.png"
READING = (
    "Speed-up: median over prompts of tokens/s over plain decoding's on the same prompt in the same run; over several "
    "suites the geometric mean of their medians, first turns only. Its 95% interval is a bootstrap over prompts. "
    "Decoding: the same from the first token on, without the prompt's time. MAT: tokens a round, bonus included, over "
    "all rounds of a suite. An answer loops if 8 tokens in a row occur in it more than 4 times; loops flatter whoever "
    "copies from the text. Contestants take turns prompt by prompt.",
    "TTFT: time to the first token. Token ms: between tokens, those that come together sharing their wait; median and "
    "95th percentile. Round ms: between verdicts, the wait a reader of the stream sees. Verify and draft: models' "
    "forwards; other: the rest of a round, messages included. Peak MB: resident memory of verifier and drafter, "
    "libraries included. Same text: as plain decoding's; a tie is a difference that rounding decides, found by a "
    "float32 forward.",
    "Nodes, depth: of the trees verified, a round. Busy: the share of the time that the target's forwards take. Hits: "
    "rounds whose tree was drafted before the verdict, which happens in mode async alone.",
)
_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:14px}td,th{padding:.3em .6em;text-align:right;border-bottom:1px solid #ddd}
.word{text-align:left}th{cursor:pointer;white-space:nowrap}th:hover{background:#eee}tr:hover td{background:#f6f6f6}
th[aria-sort=ascending]::after{content:" \\2191"}th[aria-sort=descending]::after{content:" \\2193"}
.wide{overflow-x:auto;margin-bottom:1.2em}img{width:100%;min-width:640px}h2{margin-top:2em}"""
_SORT = """for (const th of document.querySelectorAll("th")) th.onclick = () => {
  const table = th.closest("table"), place = th.cellIndex, rows = [...table.rows].slice(1);
  const down = th.getAttribute("aria-sort") !== "descending";
  for (const one of table.rows[0].cells) one.removeAttribute("aria-sort");
  th.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = row => row.cells[place].textContent, number = row => parseFloat(value(row));
  const order = (a, b) => isNaN(number(a) + number(b)) ? value(b).localeCompare(value(a)) : number(b) - number(a);
  rows.sort((a, b) => down ? order(a, b) : order(b, a));
  table.tBodies[0].append(...rows);
};"""
"""Tables sort by the column that is clicked, the largest first, then the least."""


def write(folder: Path) -> None:
    """Write the report of a folder's rows into it."""
    run = Run.read(folder)
    pictures, sections = _draw(run, folder), [*_sections(run)]
    (folder / "report.md").write_text(_markdown([*_run(folder), *READING], sections, pictures), encoding="utf8")
    (folder / "report.html").write_text(_page(folder, sections, pictures), encoding="utf8")


def _sections(run: Run) -> Iterator[tuple[str, list[Table]]]:
    """Yield the sections, the short ones first, the suites one by one last."""
    temperatures = {
        t: [row for row in run.single if row.temperature == t] for t in sorted({r.temperature for r in run.single})
    }
    if run.engines:
        yield "Other engines", [engine_figures.table(run.engines)]
    for t, some in temperatures.items():
        of = "all suites" if len(_suites(some)) > 1 else some[0].suite
        yield f"One request, T = {t:g}, {of}", _tables(first_turns(some))
    if (turns := turn_table(run.greedy)).rows:
        yield "Both turns of a conversation", [turns]
    if run.load:
        arrivals = [load_figures.arrival_table(run.load)] if any(r.arrivals for r in run.load) else []
        yield "Many requests", [load_figures.level_table(load_figures.levels(run.load)), *arrivals]
    if run.qa:
        yield "Questions that need knowledge", [qa_figures.speed_table(run.qa), qa_figures.score_table(run.qa)]
    for t, some in temperatures.items():
        straight, asked = without_loops(first_turns(some)), first_turns(some)
        if 0 < len(straight) < len(asked):
            share = f"{len({row.prompt for row in straight})} of {len({row.prompt for row in asked})}"
            yield f"T = {t:g}, prompts whose plain answer does not loop ({share})", _tables(straight)
        if len(suites := _suites(some)) > 1:  # a single suite was summarised above
            for suite in suites:
                yield f"T = {t:g}, {suite}", _tables([row for row in some if row.suite == suite])


def _suites(rows: Sequence[Row]) -> list[str]:
    return [*dict.fromkeys(row.suite for row in rows)]


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [speed_table(rows), round_table(rows)]


def _draw(run: Run, folder: Path) -> list[tuple[str, str]]:
    """Draw the pictures; return their names and titles, the most telling first."""
    made: list[tuple[str, str]] = []

    def name(file: str, title: str) -> Path:
        made.append((file, title))
        return folder / file

    asked = first_turns(run.greedy)
    if run.engines:
        plots.engines(run.engines, name(HEADLINE, "Talon and other engines: tokens/s in all"))
    if run.single:
        file = "speed-up.png" if run.engines else HEADLINE
        plots.speed_up_bars({"all suites": asked}, name(file, "Speed-up over all suites"))
        if len(suites := _suites(run.greedy)) > 1:
            panels = {suite: [row for row in run.greedy if row.suite == suite] for suite in suites}
            plots.speed_up_bars(panels, name("suites.png", "Speed-up per suite"))
        if any(int(tokens) > 1 for row in asked for tokens in row.accepted):
            plots.accepted_lengths(asked, name("accepted.png", "Tokens emitted in a round"))
    if run.load:
        plots.concurrency(load_figures.levels(run.load), name("concurrency.png", "Tokens/s over requests at once"))
    return made


def _run(folder: Path) -> list[str]:
    """Say what was run. The machine is the one that ran it, which need not be this one."""
    try:
        return (folder / ABOUT).read_text(encoding="utf8").splitlines()
    except OSError:
        return ["Machine: not recorded with these rows."]


Sections = Sequence[tuple[str, Sequence[Table]]]
Pictures = Sequence[tuple[str, str]]


def _markdown(about: Sequence[str], sections: Sections, pictures: Pictures) -> str:
    parts = ["# Benchmark", *(f"![{title}]({name})" for name, title in pictures[:1]), *about]
    for title, tables in sections:
        parts += [f"## {title}", *(table.markdown() for table in tables)]
    if pictures[1:]:
        parts += ["## Pictures", *(f"![{title}]({name})" for name, title in pictures[1:])]
    return "\n\n".join(parts) + "\n"


def _page(folder: Path, sections: Sections, pictures: Pictures) -> str:
    parts = [_picture(folder, *picture) for picture in pictures[:1]]
    parts += [f"<p>{html.escape(line)}</p>" for line in _run(folder)]
    legend = "".join(f"<p>{html.escape(line)}</p>" for line in READING)
    parts.append(f"<details><summary>How to read the tables</summary>{legend}</details>")
    for title, tables in sections:
        shown = (f'<div class="wide">{table.html()}</div>' for table in tables)
        parts += [f"<h2>{html.escape(title)}</h2>", *shown]
    parts += [_picture(folder, *picture) for picture in pictures[1:]]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Talon benchmark</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style>'
        f"<h1>Talon benchmark</h1>{''.join(parts)}<script>{_SORT}</script></html>\n"
    )


def _picture(folder: Path, name: str, title: str) -> str:
    data = base64.b64encode((folder / name).read_bytes()).decode()
    image = f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'
    return f'<h2>{html.escape(title)}</h2><div class="wide">{image}</div>'

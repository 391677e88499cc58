"""report.md and report.html: Talon's headline results, what was run, on which machine, and all results. The page
contains its pictures.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from . import headlines, load_figures, qa_figures, rival_figures, speed_plots, tree_plots
from .about import ABOUT
from .figures import Row, Summary, first_turns, speed_ups, summaries, tokens_a_round, without_loops
from .forward_plots import cost_curve
from .runs import Run
from .tables import Table, known

HEADLINE = "headline.png"
IF_DRAWN = (("tree-shapes.png", "Shape of the trees (talon shapes)"),)
"""Pictures that other commands may have left in the folder."""
READING = (
    "Speed-up: median over prompts of tokens/s over plain decoding's on the same prompt in the same run; over several "
    "suites the geometric mean of their medians, first turns only. Its 95% interval is a bootstrap over prompts. MAT: "
    "tokens a round, bonus included, over all rounds of a suite. An answer loops if 8 tokens in a row occur in it more "
    "than 4 times; loops flatter whoever copies from the text. Contestants take turns prompt by prompt.",
    "Token ms: between tokens, those that come together sharing their wait. Round ms: between verdicts, the wait a "
    "reader of the stream sees. Verify and draft: models' forwards; other: the rest of a round, messages included. "
    "Peak MB: resident memory of verifier and drafter, libraries included. Same text: as plain decoding's; a tie is a "
    "difference that rounding decides, found by a float32 forward.",
    "Nodes, depth: of the trees verified, a round. Busy: the share of the time that the target's forwards take. Hits: "
    "rounds whose tree was drafted before the verdict, which happens in mode async alone.",
)
Column = Callable[[Summary], str]


def _shown(name: str, form: str, scale: float = 1.0) -> Column:
    return lambda summary: known(getattr(summary, name), form, scale)


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


def _lines(run: Run) -> list[str]:
    """The headline results."""
    return [
        *headlines.one_request(run.single),
        *headlines.many_requests(run.load),
        *headlines.against_rivals(run.rivals),
        *headlines.losing_methods(first_turns(run.greedy)),
        *headlines.same_texts(run.single, run.load, run.qa),
    ]


def _sections(run: Run) -> Iterator[tuple[str, list[Table]]]:
    """The short ones first, the suites one by one last."""
    temperatures = {
        t: [row for row in run.single if row.temperature == t] for t in sorted({r.temperature for r in run.single})
    }
    if run.rivals:
        yield "Other engines", [rival_figures.table(run.rivals)]
    for t, some in temperatures.items():
        of = "all suites" if len(_suites(some)) > 1 else some[0].suite
        yield f"One request, T = {t:g}, {of}", _summarised(first_turns(some))
    if turns := turn_table(run.greedy):
        yield "Both turns of a conversation", [turns]
    if run.load:
        arrivals = [load_figures.arrival_table(run.load)] if any(r.arrivals for r in run.load) else []
        yield "Many requests", [load_figures.level_table(load_figures.levels(run.load)), *arrivals]
    if run.qa:
        yield "Questions that need knowledge", [qa_figures.speed_table(run.qa), qa_figures.score_table(run.qa)]
    for t, some in temperatures.items():
        straight, asked = without_loops(first_turns(some)), first_turns(some)
        if 0 < len(straight) < len(asked):
            share = f"{len(set(map(_prompt, straight)))} of {len(set(map(_prompt, asked)))}"
            yield f"T = {t:g}, prompts whose plain answer does not loop ({share})", _summarised(straight)
        if len(suites := _suites(some)) > 1:  # one was summarised above
            for suite in suites:
                yield f"T = {t:g}, {suite}", _summarised([row for row in some if row.suite == suite])


def _suites(rows: Sequence[Row]) -> list[str]:
    return [*dict.fromkeys(row.suite for row in rows)]


def _draw(run: Run, folder: Path) -> list[tuple[str, str]]:
    """Make the pictures; returns their names and titles, the most telling first."""
    made = []
    if run.rivals:
        speed_plots.engines(run.rivals, folder / HEADLINE)
        made.append((HEADLINE, "Talon and other engines: tokens/s in all"))
    elif run.single:
        speed_plots.summary_bars(first_turns(run.greedy), folder / HEADLINE)
        made.append((HEADLINE, "Speed-up over all suites"))
    if run.single:
        asked = first_turns(run.greedy)
        drafts = bool(tree_plots.drafting(asked))  # without rivals the headline is the picture of speed-ups
        for name, title, draw, told in (
            ("speed-up.png", "Speed-up over all suites", speed_plots.summary_bars, bool(run.rivals)),
            ("suites.png", "Speed-up per suite", speed_plots.speed_up_bars, len(_suites(run.greedy)) > 1),
            ("accepted.png", "Tokens emitted in a round", tree_plots.accepted_lengths, drafts),
            ("cost.png", "Cost curve of the target", cost_curve, True),
            ("trees.png", "Size and depth of the trees", tree_plots.tree_sizes, drafts),
        ):
            if told:
                draw(run.greedy if name == "suites.png" else asked, folder / name)
                made.append((name, title))
    if run.load:
        speed_plots.concurrency(load_figures.levels(run.load), folder / "concurrency.png")
        made.append(("concurrency.png", "Tokens/s over requests at once"))
    return made + [(name, title) for name, title in IF_DRAWN if (folder / name).exists()]


def write(folder: Path) -> None:
    """Write the report of a folder's rows beside them."""
    run = Run.read(folder)
    lines, pictures, sections = _lines(run), _draw(run, folder), [*_sections(run)]
    (folder / "report.md").write_text(_markdown(lines, _about(folder), sections, pictures), encoding="utf8")
    (folder / "report.html").write_text(_page(folder, lines, sections, pictures), encoding="utf8")


def turn_table(rows: Sequence[Row]) -> Table | None:
    """Each turn of multi-turn conversations: tokens already in the cache, and tokens accepted."""
    later = {row.suite.partition(",")[0] for row in rows if row.turn > 1}
    lines = []
    for suite, method in dict.fromkeys((row.suite, row.method) for row in rows if row.suite.partition(",")[0] in later):
        mine = [row for row in rows if (row.suite, row.method) == (suite, method)]
        cached = [row.cached_tokens for row in mine if row.cached_tokens is not None]
        accepted = tokens_a_round(mine)
        first = [row.time_to_first_token_s for row in mine if row.time_to_first_token_s is not None]
        lines.append(
            [
                str(mine[0].turn),
                method,
                f"{mean(row.prompt_tokens for row in mine):.0f}",
                f"{mean(cached):.0f}" if cached else "-",
                f"{1000 * median(first):.0f}" if first else "-",
                f"{mean(row.tokens_per_second for row in mine):.0f}",
                f"{median(speed_ups([row for row in rows if row.suite == suite], method)):.2f}x",
                "-" if accepted is None else f"{accepted:.2f}",
            ]
        )
    columns = ("turn", "method", "prompt", "cached", "first ms", "tokens/s", "speed-up", "MAT")
    title = "Turns of a conversation: tokens of the prompt, those found in the cache"
    return Table(title, columns, lines, words=2) if lines else None


def _summarised(rows: Sequence[Row]) -> list[Table]:
    """The contestants, fastest first: what a user sees, then what their rounds consist of."""
    lines = sorted(summaries(rows), key=lambda s: -s.speed_up)
    made_of_rounds = [s for s in lines if s.round_ms_p50 is not None]
    return [_table("Answers", lines, SPEED), _table("Rounds", made_of_rounds, ROUNDS)]


def _table(title: str, lines: Sequence[Summary], columns: dict[str, Column]) -> Table:
    return Table(title, [*columns], [[cell(line) for cell in columns.values()] for line in lines])


def _prompt(row: Row) -> tuple[str, str]:
    return row.suite, row.question_id


def _about(folder: Path) -> list[str]:
    """What was run and how to read it. The machine is the one that ran it, which need not be this one."""
    try:
        run = (folder / ABOUT).read_text(encoding="utf8").splitlines()
    except OSError:
        run = ["Machine: not recorded with these rows."]
    return [*run, *READING]


Sections = Sequence[tuple[str, Sequence[Table]]]
Pictures = Sequence[tuple[str, str]]


def _markdown(lines: Sequence[str], about: Sequence[str], sections: Sections, pictures: Pictures) -> str:
    parts = ["# Benchmark", "\n".join(f"- {line}" for line in lines)]
    parts += [f"![{title}]({name})" for name, title in pictures[:1]]
    parts += about
    for title, tables in sections:
        parts += [f"## {title}", *(table.markdown() for table in tables)]
    if pictures[1:]:
        parts += ["## Pictures", *(f"![{title}]({name})" for name, title in pictures[1:])]
    return "\n\n".join(parts) + "\n"


def _page(folder: Path, lines: Sequence[str], sections: Sections, pictures: Pictures) -> str:
    bold = (re.sub(r"\*\*(.*?)\*\*", r"<b>\1</b>", html.escape(line)).replace("`", "") for line in lines)
    parts = [f"<ul>{''.join(f'<li>{line}</li>' for line in bold)}</ul>"]
    parts += [_picture(folder, *picture) for picture in pictures[:1]]
    parts += [f"<p>{html.escape(line)}</p>" for line in _about(folder)]
    for title, tables in sections:
        parts += [f"<h2>{html.escape(title)}</h2>", *(table.html() for table in tables)]
    parts += [_picture(folder, *picture) for picture in pictures[1:]]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Talon benchmark</title><style>{_STYLE}</style>'
        f"<h1>Talon benchmark</h1>{''.join(parts)}</html>\n"
    )


def _picture(folder: Path, name: str, title: str) -> str:
    data = base64.b64encode((folder / name).read_bytes()).decode()
    return f'<h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'

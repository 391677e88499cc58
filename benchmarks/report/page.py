"""Writes report.md: what was run, on which machine, and all results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from . import engine_figures, load_figures, plots, qa_figures
from .about import ABOUT
from .figures import Row, by_temperature, first_turns, round_table, speed_table, turn_table, without_loops
from .runs import Run
from .tables import Table

HEADLINE = "headline.png"
READING = (
    "Speed-up: median over prompts of tokens/s over plain decoding's on the same prompt in the same run; over several "
    "suites the geometric mean of their medians, first turns only. Its 95% interval is a bootstrap over prompts, each "
    "with the median of its repeats. "
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


def write(folder: Path) -> None:
    """Write the report of a folder's rows into it."""
    run = Run.read(folder)
    text = _markdown([*_run(folder), *READING], [*_sections(run)], _draw(run, folder))
    (folder / "report.md").write_text(text, encoding="utf8")


def _sections(run: Run) -> Iterator[tuple[str, list[Table]]]:
    """Yield the sections, the short ones first, the suites one by one last."""
    temperatures = by_temperature(run.single)
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


def _markdown(
    about: Sequence[str], sections: Sequence[tuple[str, Sequence[Table]]], pictures: Sequence[tuple[str, str]]
) -> str:
    parts = ["# Benchmark", *(f"![{title}]({name})" for name, title in pictures[:1]), *about]
    for title, tables in sections:
        parts += [f"## {title}", *(table.markdown() for table in tables)]
    if pictures[1:]:
        parts += ["## Pictures", *(f"![{title}]({name})" for name, title in pictures[1:])]
    return "\n\n".join(parts) + "\n"

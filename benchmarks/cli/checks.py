"""`talon report`, `talon check` and `talon qa`."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from engine import config as configuration
from engine.cli.command import ConfigOption, SetOption, one_line_errors, overrides, run
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams

from ..report.out_folder import compare_runs, results_in, write_report
from .options import AgainstOption, HeadsOption, MinutesOption, QuestionsOption, names_in, numbers_in, question_files


def report(
    folder: Annotated[Path, typer.Argument(help="What talon bench --out named.")], against: AgainstOption = None
) -> None:
    """Make report.md again from the rows of a benchmark, or compare two runs of it."""

    async def main() -> None:
        if against is None:
            write_report(folder, Console(stderr=True))
        else:
            compare_runs(folder, against, Console())

    run(main())


def check(
    questions: QuestionsOption = None,
    methods: Annotated[str, typer.Option(help="Comma-separated, as they are served; a wrong name lists them.")] = (
        "none,pld,suffix"
    ),
    modes: Annotated[
        str | None, typer.Option(help="Comma-separated: sequential, async, auto.", show_default="as configured")
    ] = None,
    transports: Annotated[str, typer.Option(help="Comma-separated: inproc (threads), ipc (processes).")] = "inproc,ipc",
    threads: Annotated[
        str | None, typer.Option(help="Comma-separated: threads of the verifier, 1,2.", show_default="as configured")
    ] = None,
    at_once: Annotated[int, typer.Option(help="Requests under way; plain decoding has one.", min=1)] = 1,
    limit: Annotated[int | None, typer.Option(help="Questions per file.", show_default="all", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            help="May be given again. At 0, plain decoding is also compared with transformers in float32.",
            show_default="0",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    spread: Annotated[
        bool,
        typer.Option(
            "--spread",
            help="A question under one setting of each method, in turn, not under all. With --kernels: a kernel as on "
            "one other processor, in turn, and a ninth of those that are modelled.",
        ),
    ] = False,
    log: Annotated[
        Path | None, typer.Option(help="File for what was compared. A check that was ended goes on from there.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="float32: instead, how often another token is the likeliest than in float32, and the divergence from "
            "it, in bfloat16 and with activations=int8."
        ),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Instead, list every kernel of attention and products by the instructions that it needs, and whether "
            "it agrees here with its definition in float64.",
        ),
    ] = False,
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """Show that every method, mode, transport and number of threads gives the text of plain decoding; exit code 1 if
    one does not."""
    console = Console(stderr=True)
    if kernels:
        with one_line_errors():
            _check_kernels(console, spread)
        return
    if against is not None:
        with one_line_errors():
            _check_precision(
                against, configuration.load(config, overrides(set_)), questions, limit, max_tokens, console
            )
        return

    async def main() -> int:
        from ..measure.check import Grid, run_check
        from ..measure.equality import errors, table, verdict

        settings = configuration.load(config, overrides(set_))
        counts: list[int | None] = [int(n) for n in numbers_in("threads", threads, whole=True)]
        temperatures = list(dict.fromkeys(temperature or [0.0]))
        samplings = [SamplingParams(max_tokens=max_tokens, temperature=t, seed=seed).validate() for t in temperatures]
        grid = Grid(
            names_in(methods),
            [settings.mode] if modes is None else names_in(modes),
            names_in(transports),
            counts or [settings.verifier.threads],
            temperatures,
            at_once,
            spread,
        )
        comparisons = await run_check(settings, grid, question_files(questions), limit, samplings[0], log, console)
        Console().print(table(comparisons).rich(), f"\n{verdict(comparisons)}", highlight=False)
        for error in (wrong := errors(comparisons)):
            console.print(f"different text: {error}", markup=False, soft_wrap=True)
        return len(wrong)

    if run(main()):
        raise typer.Exit(1)


def _check_kernels(told: Console, spread: bool) -> None:
    from ..kernels.every import check_kernels, counted, instructions_of_kernels, kernel_table
    from ..kernels.processors import PROCESSORS, check_as, environment_as, is_modelled, shares_of

    out = Console(width=120, highlight=False)
    told.print("talon: each kernel is compiled the first time, which takes some minutes")
    checks = check_kernels()
    out.print(kernel_table(checks).rich(), f"\non this processor: {counted(checks)}")
    able = [one for one in PROCESSORS if environment_as(one) is not None]
    everything = [*range(len(instructions_of_kernels()))]
    shares = shares_of(able) if spread else dict.fromkeys(able, everything)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each check is a process, which compiles on one core
        found_as = dict(zip(able, pool.map(check_as, able, shares.values()), strict=True))
    for processor in PROCESSORS:
        if (found := found_as.get(processor)) is None:
            out.print(f"as on one with {processor.name}: not run, this processor is one or cannot stand for it")
            continue
        how = ", by models of its instructions" if is_modelled(processor) else ""
        out.print(f"as on one with {processor.name}{how}: {counted(found)}")
        if wrong := [check for check in found if check.difference]:
            out.print(kernel_table(wrong).rich())
        checks += found
    if any(check.difference for check in checks):
        raise typer.Exit(1)


def _check_precision(
    against: str,
    config: configuration.Config,
    questions: list[Path] | None,
    limit: int | None,
    most: int,
    told: Console,
) -> None:
    from ..measure.precision import measure_precision, precision_table

    if against != "float32":
        raise ConfigError(f"--against {against}: give float32")
    Console().print(precision_table(measure_precision(config, question_files(questions), limit, most, told)).rich())


def qa(
    questions: Annotated[
        list[Path] | None, typer.Option("--questions", help="JSONL with rows of category nq, rag or qa; repeatable.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated contestants; datastore drafts from all passages.")
    ] = "none,talon-pld,talon-suffix,talon-datastore",
    limit: Annotated[int | None, typer.Option(help="Questions of each category.", show_default="all", min=1)] = None,
    passages: Annotated[int, typer.Option(help="Passages retrieved into the prompt.", min=1)] = 2,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling and of the order of contestants.")] = 0,
    minutes: MinutesOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run into --out stopped.")] = False,
    heads: HeadsOption = None,
    out: Annotated[Path, typer.Option(help="Folder for qa.jsonl and the report.")] = Path("out"),
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Ask knowledge-heavy questions, closed book, with their own passage and with retrieved ones: scores, MAT,
    tokens/s.
    """
    console = Console(stderr=True)

    async def main() -> int:
        from ..measure.plan import MeasurementPlan
        from .parts import knowledge, knowledge_tables

        if not questions:
            raise ConfigError("--questions: name at least one JSONL file with rows of category nq, rag or qa")
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed).validate()
        settings = configuration.load(config, overrides(set_))
        names = names_in(methods)
        plan = MeasurementPlan(settings, names, questions, out, [sampling], limit, 1, minutes, heads, resume)
        with results_in(out):
            failed, retrieval, rows = await knowledge(plan, passages, console)
        if as_json:
            print(json.dumps(msgspec.to_builtins({"retrieval": retrieval, "rows": rows}), indent=2))
        else:
            Console().print(*(table.rich() for table in knowledge_tables(rows)), str(retrieval or ""))
        return failed

    if run(main()):
        raise typer.Exit(1)

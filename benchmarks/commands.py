"""`talon bench` and `talon check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine import config as configuration
from engine.cli import ConfigOption, SetOption, overrides, run
from engine.errors import ConfigError
from engine.sampling import SamplingParams

QuestionsOption = Annotated[
    list[Path] | None, typer.Option("--questions", help="JSONL file of the Spec-Bench form; may be given again.")
]


def bench(
    questions: QuestionsOption = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated: none, pld, suffix, sps; hf is transformers generate.")
    ] = "none,pld,suffix",
    limit: Annotated[int | None, typer.Option(help="Questions per file.", show_default="all")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling and of the order of methods.")] = 0,
    repeats: Annotated[int, typer.Option(help="How often everything is run.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl.")] = Path("out"),
    overhead: Annotated[
        bool, typer.Option("--overhead", help="Measure the time per round outside model forwards instead.")
    ] = False,
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """Compare methods on question files: tokens/s, speed-up over plain decoding, MAT, and whether texts are equal."""
    console = Console(stderr=True)
    names = [name.strip() for name in methods.split(",")]

    if not overhead:
        out.mkdir(parents=True, exist_ok=True)

    async def main() -> None:
        from benchmarks.bench import run_bench, run_overhead, summary

        settings = configuration.load(config, overrides(set_))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed).validate()
        if overhead:
            Console().print(await run_overhead(settings, [n for n in names if n != "hf"], sampling, console))
            return
        rows = await run_bench(settings, names, _files(questions), out, limit, sampling, repeats, console)
        Console().print(summary(rows))
        console.print(f"rows: {out / 'results.jsonl'}")

    run(main())


def check(
    questions: QuestionsOption = None,
    methods: Annotated[str, typer.Option(help="Comma-separated: none, pld, suffix, sps.")] = "none,pld,suffix",
    transports: Annotated[str, typer.Option(help="Comma-separated: inproc (threads), ipc (processes).")] = "inproc,ipc",
    limit: Annotated[int | None, typer.Option(help="Questions per file.", show_default="all")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 compares with transformers, else with plain decoding of the same seed.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """Show that every method and transport gives the text of plain decoding; exit code 1 if one does not."""
    console = Console(stderr=True)

    async def main() -> int:
        from benchmarks.equality import report, run_check
        from engine.target import Target

        settings = configuration.load(config, overrides(set_))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed).validate()
        comparisons = await run_check(
            settings, methods.split(","), transports.split(","), _files(questions), limit, sampling, console
        )
        dtype = str(Target.load(settings.model, settings.dtype, settings.device).dtype).removeprefix("torch.")
        table, wrong = report(comparisons, dtype)
        Console().print(table)
        return wrong

    if run(main()):
        raise typer.Exit(1)


def _files(questions: list[Path] | None) -> list[Path]:
    if not questions:
        raise ConfigError("--questions: name at least one JSONL file of the Spec-Bench form")
    return questions

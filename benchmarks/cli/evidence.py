"""`talon evidence`: everything that is measured of one model, in one run of given minutes and one report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine import config as configuration
from engine.cli.command import ConfigOption, SetOption, overrides, run
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams

from ..report.out_folder import compare_runs, results_in
from ..report.runs import Run
from .options import AgainstOption, DraftOption, GgufOption, HeadsOption, RivalsOption, names_in, rivals_in

SHARES = {"single": 0.45, "concurrency": 0.18, "qa": 0.12, "rivals": 0.25}
"""Share of the minutes, by part."""
SUITES = ("gsm8k", "humaneval", "alpaca", "mt_bench", "sum", "qa")
KNOWLEDGE = ("nq_open", "spec_bench_dev")
KNOWLEDGE_METHODS = ("talon-pld", "talon-suffix", "talon-datastore", "talon")
LEVELS = (1, 2, 4, 8, 16)
METHODS = (
    "none,pld,lookahead,suffix,recycling,sps,medusa,hydra,eagle2,eagle3,block,"
    "talon-pld,talon-session,talon-suffix,talon-tree,hybrid,talon,hf,hf-pld"
)


def evidence(
    questions: Annotated[
        Path, typer.Option(help=f"Folder of JSONL files: {', '.join(SUITES)}; for qa {', '.join(KNOWLEDGE)}.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for rows, pictures and the report.")] = Path("out"),
    minutes: Annotated[float, typer.Option(help="For all parts, starting what is measured included.", min=0.0)] = 60.0,
    parts: Annotated[str, typer.Option(help="Comma-separated; the rows of others stay in the report.")] = ",".join(
        SHARES
    ),
    methods: Annotated[str, typer.Option(help="Of the part single: all, or comma-separated contestants.")] = METHODS,
    served: Annotated[str, typer.Option(help="Comma-separated methods of the parts concurrency and rivals.")] = (
        "suffix,pld,talon"
    ),
    rivals: RivalsOption = None,
    gguf: GgufOption = None,
    draft: DraftOption = None,
    heads: HeadsOption = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    limit: Annotated[int | None, typer.Option(help="Questions per file.", show_default="all", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling and of the order of contestants.")] = 0,
    against: AgainstOption = None,
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """Measure everything: one request at T = 0 and 1, many at once, knowledge questions, other engines."""
    console = Console(stderr=True)
    wanted = names_in(parts)

    async def main() -> int:
        if unknown := [part for part in wanted if part not in SHARES]:
            raise ConfigError(f"--parts {unknown[0]}: no such part; known: {', '.join(SHARES)}")
        from ..measure.contestants import check_name, every
        from ..measure.load import settings_of
        from ..measure.plan import MeasurementPlan
        from . import parts as measured

        settings = configuration.load(config, overrides(set_))
        suites, knowledge = (_files(questions, names) for names in (SUITES, KNOWLEDGE))
        if not suites and not knowledge:
            raise ConfigError(f"--questions {questions}: holds none of {', '.join((*SUITES, *KNOWLEDGE))}.jsonl")
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed).validate()
        contestants = every() if methods == "all" else names_in(methods)
        for name in contestants:
            check_name(name)
        for name in names_in(served):
            settings_of(name, settings)
        if against is not None:
            Run.read(against)  # a folder that cannot be read is refused before anything is measured
        known_rivals = rivals_in(rivals, gguf, draft)
        lacking = _lacking(questions, suites, knowledge, rivals)
        for part in (part for part in wanted if part in lacking):
            console.print(f"left out: {part}: {lacking[part]}", markup=False)
        drawn = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed)

        def plan(
            names: Sequence[str], files: Sequence[Path], share: float, *samplings: SamplingParams
        ) -> MeasurementPlan:
            return MeasurementPlan(
                settings, names, files, out, samplings or [sampling], limit, minutes=share, heads=heads
            )

        async def alone(share: float) -> int:
            return (await measured.single(plan(contestants, suites, share, sampling, drawn), console))[0]

        async def known(share: float) -> int:
            failed, retrieval, _ = await measured.knowledge(plan(KNOWLEDGE_METHODS, knowledge, share), 2, console)
            console.print(str(retrieval or "no passages"))
            return failed

        async def others(share: float) -> int:
            assert known_rivals is not None
            return await measured.baselines(plan(names_in(served), suites, share), (1, 8), known_rivals, console)

        measure: dict[str, Callable[[float], Awaitable[int]]] = {
            "single": alone,
            "concurrency": lambda share: measured.load(plan(names_in(served), suites, share), LEVELS, (), console),
            "qa": known,
            "rivals": others,
        }
        possible = [part for part in wanted if part not in lacking]
        whole, failed = sum(SHARES[part] for part in possible), 0
        with results_in(out):
            for part in possible:
                failed += await measure[part](minutes * SHARES[part] / whole)
            if against is not None:
                compare_runs(out, against, Console())
        return failed

    if run(main()):
        raise typer.Exit(1)


def _lacking(questions: Path, suites: Sequence[Path], knowledge: Sequence[Path], rivals: Path | None) -> dict[str, str]:
    """Return the parts that cannot be measured, and why."""
    lacking: dict[str, str] = {}
    if not suites:
        why = f"--questions {questions} holds none of {', '.join(SUITES)}.jsonl"
        lacking |= dict.fromkeys(("single", "concurrency", "rivals"), why)
    if not knowledge:
        lacking["qa"] = f"--questions {questions} holds none of {', '.join(KNOWLEDGE)}.jsonl"
    if rivals is None:
        lacking["rivals"] = "name the folder of their environments with --rivals"
    return lacking


def _files(folder: Path, names: Sequence[str]) -> list[Path]:
    return [file for name in names if (file := folder / f"{name}.jsonl").is_file()]

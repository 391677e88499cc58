"""`talon evidence`: all figures of the README and docs/benchmarks.md, in one run of given minutes and one report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine import config as configuration
from engine.cli.command import ConfigOption, SetOption, overrides, run
from engine.config import Config
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams

from ..measure.differences import tell_differences, tell_load_differences, tell_qa_differences
from ..report.out_folder import check_run, compare_runs, results_in, write_report
from .options import AgainstOption, gguf_file, names_in

SHARES = {"single": 0.45, "concurrency": 0.18, "qa": 0.12, "rivals": 0.25}
"""Share of the minutes, by part."""
SUITES = ("gsm8k", "humaneval", "alpaca", "mt_bench", "sum", "qa")
KNOWLEDGE = ("nq_open", "spec_bench_dev")
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
    rivals: Annotated[Path | None, typer.Option(help="Folder of the rivals' environments, as of talon bench.")] = None,
    gguf: Annotated[Path | None, typer.Option(help="The model's GGUF file, for rivals.")] = None,
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
        check_run(against)
        weights = None if rivals is None else gguf_file(gguf)
        lacking = _lacking(questions, suites, knowledge, rivals)
        for part in (part for part in wanted if part in lacking):
            console.print(f"left out: {part}: {lacking[part]}", markup=False)
        asking = _Evidence(settings, suites, knowledge, out, sampling, limit, console)
        measure: dict[str, Callable[[float], Awaitable[int]]] = {
            "single": lambda share: asking.single(contestants, share),
            "concurrency": lambda share: asking.concurrency(names_in(served), share),
            "qa": asking.knowledge_questions,
            "rivals": lambda share: asking.rivals(names_in(served), rivals, weights, share),
        }
        possible = [part for part in wanted if part not in lacking]
        whole, failed = sum(SHARES[part] for part in possible), 0
        with results_in(out):
            for part in possible:
                failed += await measure[part](minutes * SHARES[part] / whole)
                write_report(out, console)
            if against is not None:
                compare_runs(out, against, Console())
        return failed

    if run(main()):
        raise typer.Exit(1)


class _Evidence:
    """The parts, one after the other; each returns how many texts differ that must be equal."""

    def __init__(
        self,
        config: Config,
        suites: Sequence[Path],
        knowledge: Sequence[Path],
        out: Path,
        sampling: SamplingParams,
        limit: int | None,
        console: Console,
    ):
        self.config, self.suites, self.knowledge = config, suites, knowledge
        self.out, self.sampling, self.limit, self.console = out, sampling, limit, console

    async def single(self, names: Sequence[str], minutes: float) -> int:
        from ..measure.bench import Single, run_bench

        drawn = SamplingParams(max_tokens=self.sampling.max_tokens, temperature=1.0, seed=self.sampling.seed)
        what = Single(self.suites, self.limit, [self.sampling, drawn], minutes=minutes)
        return tell_differences(await run_bench(self.config, names, what, self.out, None, self.console), self.console)

    async def concurrency(self, methods: Sequence[str], minutes: float) -> int:
        from ..measure.load import Load, run_load

        what = Load(LEVELS, (), self.sampling, 1, minutes)
        rows = await run_load(self.config, methods, self.suites, self.out, self.limit, what, None, self.console)
        return tell_load_differences(rows, self.console)

    async def knowledge_questions(self, minutes: float) -> int:
        from ..measure.qa import DENSE, Knowledge, run_qa

        what = Knowledge(self.knowledge, self.limit, 2, self.sampling, minutes)
        names = ["talon-pld", "talon-suffix", "talon-suffix" + DENSE, "talon-datastore", "talon"]
        retrieval, rows = await run_qa(self.config, names, what, self.out, None, self.console)
        self.console.print(str(retrieval or "no passages"))
        return tell_qa_differences(rows, self.console)

    async def rivals(self, methods: Sequence[str], folder: Path | None, gguf: Path | None, minutes: float) -> int:
        from ..rivals.compare import Rivalry, run_rivals

        assert folder is not None and gguf is not None
        what = Rivalry(folder, gguf, self.suites, self.limit, (1, 8), 1, self.sampling, minutes)
        await run_rivals(self.config, methods, what, self.out, None, self.console)
        return 0


def _lacking(questions: Path, suites: Sequence[Path], knowledge: Sequence[Path], rivals: Path | None) -> dict[str, str]:
    """The parts that cannot be measured, and why."""
    lacking: dict[str, str] = {}
    if not suites:
        why = f"--questions {questions} holds none of {', '.join(SUITES)}.jsonl"
        lacking |= dict.fromkeys(("single", "concurrency", "rivals"), why)
    if not knowledge:
        lacking["qa"] = f"--questions {questions} holds none of {', '.join(KNOWLEDGE)}.jsonl"
    if rivals is None:
        lacking["rivals"] = "name the folder of their environments with --rivals, and --gguf"
    return lacking


def _files(folder: Path, names: Sequence[str]) -> list[Path]:
    return [file for name in names if (file := folder / f"{name}.jsonl").is_file()]

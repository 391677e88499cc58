"""`talon bench`, `talon report`, `talon check` and `talon qa`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from engine import config as configuration
from engine.command import DISK_FULL, ConfigOption, SetOption, overrides, run
from engine.config import Config
from engine.errors import ConfigError
from engine.sampling import SamplingParams

from .figures import PEERS, Row

if TYPE_CHECKING:
    from .load_figures import LoadRow
    from .qa_figures import QaRow

QuestionsOption = Annotated[
    list[Path] | None, typer.Option("--questions", help="JSONL file of the Spec-Bench form; may be given again.")
]
HeadsOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the drafters' weights: eagle, eagle3, medusa, hydra, sps.", show_default="drafter.path"
    ),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        help="As long as this, where another answer narrows an interval most.",
        show_default="until all is asked",
        min=0.0,
    ),
]
AgainstOption = Annotated[
    Path | None, typer.Option(help="Folder of an earlier run: which cells agree, and which changed?")
]


def bench(
    questions: QuestionsOption = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated contestants, or all, or ablation; a wrong name lists them.")
    ] = "none,pld,suffix",
    limit: Annotated[int | None, typer.Option(help="Questions per file.", show_default="all", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[list[float] | None, typer.Option(help="May be given again.", show_default="0")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling and of the order of contestants.")] = 0,
    repeats: Annotated[int, typer.Option(help="How often everything is run, each time afresh.", min=1)] = 1,
    minutes: MinutesOption = None,
    against: AgainstOption = None,
    heads: HeadsOption = None,
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl and the report.")] = Path("out"),
    overhead: Annotated[
        bool, typer.Option("--overhead", help="Measure the time per round outside model forwards instead.")
    ] = False,
    calibration: Annotated[
        bool, typer.Option("--calibration", help="Also draw what trees promised and what came of it, for each source.")
    ] = False,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,4,8,16",
            help="Measure many requests at once instead: tokens/s in all, time to the first token, pauses between "
            "emissions. Files are mixed, methods take turns at each level, every text is compared with the same "
            "prompt's alone. Rows: load.jsonl, picture: concurrency.png.",
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            metavar="0.5,0.8,1.2",
            help="Measure requests that arrive at random instead, or too: at these shares of what none answers with "
            "16 at once, which is measured first. Goodput counts answers whose first token came within 1 s and whose "
            "others within 0.1 s each.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure a server that speaks OpenAI's API instead, with --concurrency clients at once: tokens/s, "
            "time to the first token, refusals. Its key is OPENAI_API_KEY. Rows: clients.jsonl.",
        ),
    ] = None,
    rivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Compare with other engines instead, at --concurrency requests at once: llama.cpp, OpenVINO, vLLM, "
            "each in a virtual environment of that folder; what is not there is left out, with the line that installs "
            "it. Rows: rivals.jsonl.",
        ),
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="The model's GGUF file; --rivals gives its weights to engines that read GGUF.")
    ] = None,
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """Compare contestants on question files: tokens/s, speed-up over plain decoding, MAT, equality of texts.

    talon bench --questions gsm8k.jsonl --methods none,pld,suffix --limit 10

    talon bench --questions gsm8k.jsonl --questions sum.jsonl --concurrency 1,4,16 --repeats 3
    """
    console = Console(stderr=True)

    async def main() -> int:
        from .bench import run_overhead
        from .contestants import ABLATION, every

        groups = {"all": every(), "ablation": list(ABLATION)}
        names = groups.get(methods) or names_in(methods)
        settings = configuration.load(config, overrides(set_))
        samplings = [
            SamplingParams(max_tokens=max_tokens, temperature=value, seed=seed).validate()
            for value in temperature or [0.0]
        ]
        levels = [int(level) for level in _numbers("concurrency", concurrency, whole=True)]
        shares = _numbers("arrivals", arrivals)
        if (levels or shares) and len(samplings) > 1:
            raise ConfigError("--temperature: give one with --concurrency and --arrivals")
        if overhead:
            table = await run_overhead(settings, [n for n in names if n not in PEERS], samplings[0], console)
            Console().print(table.rich())
            return 0
        with results_in(out):
            if server is not None:
                return await measure_server(server, levels or [1, 4, 8, 16, 64], samplings[0])
            if rivals is not None:
                failed = await measure_rivals(rivals, names, settings, levels or [1, 8], samplings[0])
            elif levels or shares:
                failed = await measure_load(names, settings, levels, shares, samplings[0])
            else:
                failed = await measure(names, settings, samplings)
            if against is not None:
                compare_runs(out, against, Console())
            return failed

    async def measure(names: list[str], settings: Config, samplings: list[SamplingParams]) -> int:
        from .bench import Single, gathered, run_bench, summary

        with tempfile.TemporaryDirectory(prefix="talon-calibration-") as folder:
            kept = Path(folder) if calibration else None
            what = Single(question_files(questions), limit, samplings, repeats, minutes)
            rows = await run_bench(settings, names, what, out, heads, console, kept)
            if kept is not None:
                draw_calibration(gathered(kept), out / "calibration.png", console)
        Console().print(summary(rows).rich())
        write_report(out, console)
        return tell_differences(rows, console)

    async def measure_load(
        names: list[str], settings: Config, levels: list[int], shares: list[float], sampling: SamplingParams
    ) -> int:
        from .load import Load, run_load
        from .load_figures import arrival_table, level_table
        from .load_figures import levels as lines_of

        what = Load(levels, shares, sampling, repeats, minutes)
        rows = await run_load(settings, names, question_files(questions), out, limit, what, heads, console)
        Console().print(level_table(lines_of(rows)).rich())
        if shares:
            Console().print(arrival_table(rows).rich())
        write_report(out, console)
        return tell_load_differences(rows, console)

    async def measure_server(url: str, levels: list[int], sampling: SamplingParams) -> int:
        from .clients import run_clients, table

        Console().print(
            table(url, await run_clients(url, question_files(questions), limit, levels, sampling, out)).rich()
        )
        console.print(f"rows: {out / 'clients.jsonl'}")
        return 0

    async def measure_rivals(
        folder: Path, names: list[str], settings: Config, levels: list[int], sampling: SamplingParams
    ) -> int:
        from .rivals.compare import Rivalry, run_rivals
        from .rivals.figures import table

        what = Rivalry(folder, gguf_file(gguf), question_files(questions), limit, levels, repeats, sampling, minutes)
        Console().print(table(await run_rivals(settings, names, what, out, heads, console)).rich())
        write_report(out, console)
        return 0

    if run(main()):
        raise typer.Exit(1)


def _numbers(option: str, listed: str | None, whole: bool = False) -> list[float]:
    """What such an option lists, each above 0 and once."""
    try:
        numbers = sorted({float(number) for number in (listed or "").split(",") if number.strip()})
    except ValueError:
        numbers = [0.0]
    if (listed is not None and not numbers) or any(not 0 < n < 10_000 or (whole and n % 1) for n in numbers):
        example = "1,2,4,8,16" if whole else "0.5,0.8,1.2"
        raise ConfigError(f"--{option} {listed}: give {'whole ' if whole else ''}numbers above 0, such as {example}")
    return numbers


@contextmanager
def results_in(out: Path) -> Iterator[None]:
    """Make the folder; a disk that fills is one line."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: is no folder and cannot be made one ({error.strerror})") from None
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise ConfigError(f"--out {out}: the disk is full: make room, or name another folder") from None


def gguf_file(gguf: Path | None) -> Path:
    if gguf is None or not gguf.is_file():
        raise ConfigError(f"--gguf {gguf or ''}: name the model's GGUF file, whose weights some rivals read")
    return gguf


def tell_differences(rows: Sequence[Row], console: Console) -> int:
    """A line for every text that differs from plain decoding's; how many are errors."""
    different = [
        row for row in rows if row.output_equal is False and row.method not in PEERS
    ]  # those round in their own way
    for row in different:
        kind = "a tie that rounding decides" if row.tie else "different text"
        where = f"{row.method}, {row.suite} {row.question_id}, T = {row.temperature:g}"
        console.print(f"{kind}: {where}: {row.difference}")
    return sum(not row.tie for row in different)


def tell_load_differences(rows: Sequence[LoadRow], console: Console) -> int:
    """A line for every text that differs from that of its request alone; how many are errors."""
    different = [row for row in rows if not row.output_equal]
    for row in different:
        kind = "different text" if row.exact else "different text (the target is not exact)"
        beside = f"{row.concurrency} at once" if row.concurrency else f"arrivals at {row.arrivals:g}"
        console.print(f"{kind}: {row.method}, {row.suite} {row.question_id}, {beside}")
    return sum(row.exact for row in different)


def report(
    folder: Annotated[Path, typer.Argument(help="What talon bench --out named.")],
    against: AgainstOption = None,
) -> None:
    """Make report.md and report.html again from the rows of a benchmark, or compare two runs of it."""

    async def main() -> None:
        if against is None:
            write_report(folder, Console(stderr=True))
        else:
            compare_runs(folder, against, Console())

    run(main())


def draw_calibration(sources: dict[str, NDArray[np.float64]], path: Path, console: Console) -> None:
    """The picture; without matplotlib or anything to draw, a line that says why there is none."""
    try:
        from .plots import reliability
    except ImportError as error:
        console.print(f"no picture: {error}; pip install 'talon-decoding[bench]'")
        return
    if not sources:
        console.print("no picture: none of the contestants drafted anything")
        return
    reliability(sources, path)
    console.print(f"promised and observed acceptance: {path}")


def compare_runs(folder: Path, other: Path, console: Console) -> None:
    """Say which share of two runs' cells agrees, and name those that changed."""
    from .cells import compared
    from .runs import Run

    for line in compared(Run.read(folder).cells(), Run.read(other).cells(), other):
        console.print(line, highlight=False, soft_wrap=True)


def write_report(folder: Path, console: Console) -> None:
    """report.md, report.html and their pictures; without matplotlib, a line that says how to get them."""
    try:
        from .report import write
    except ImportError as error:
        console.print(f"no report: {error}; pip install 'talon-decoding[bench]'")
        return
    write(folder)
    console.print(f"rows, pictures and report: {folder}")


def check(
    questions: QuestionsOption = None,
    methods: Annotated[str, typer.Option(help="Comma-separated: none, pld, suffix, sps.")] = "none,pld,suffix",
    transports: Annotated[str, typer.Option(help="Comma-separated: inproc (threads), ipc (processes).")] = "inproc,ipc",
    limit: Annotated[int | None, typer.Option(help="Questions per file.", show_default="all", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="At 0, plain decoding is also compared with transformers in float32.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """Show that every method and transport gives the text of plain decoding; exit code 1 if one does not."""
    console = Console(stderr=True)

    async def main() -> int:
        from .equality import report, run_check

        settings = configuration.load(config, overrides(set_))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed).validate()
        comparisons = await run_check(
            settings, names_in(methods), names_in(transports), question_files(questions), limit, sampling, console
        )
        table, errors = report(comparisons)
        Console().print(table.rich())
        for error in errors:
            console.print(f"different text: {error}", markup=False, soft_wrap=True)
        return len(errors)

    if run(main()):
        raise typer.Exit(1)


def qa(
    questions: Annotated[
        list[Path] | None, typer.Option("--questions", help="JSONL with rows of category nq, rag or qa; repeatable.")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated contestants; METHOD+dense also drafts from the passages found, datastore from all."
        ),
    ] = "none,pld,suffix,suffix+dense,datastore",
    limit: Annotated[int | None, typer.Option(help="Questions of each category.", show_default="all", min=1)] = None,
    passages: Annotated[int, typer.Option(help="Passages retrieved into the prompt.", min=1)] = 2,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling and of the order of contestants.")] = 0,
    minutes: MinutesOption = None,
    heads: HeadsOption = None,
    out: Annotated[Path, typer.Option(help="Folder for qa.jsonl and the report.")] = Path("out"),
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Knowledge-heavy questions, closed book, with their own passage and with retrieved ones: scores, MAT, tokens/s."""
    console = Console(stderr=True)

    async def main() -> int:
        from .qa import Knowledge, run_qa
        from .qa_figures import score_table, speed_table

        if not questions:
            raise ConfigError("--questions: name at least one JSONL file with rows of category nq, rag or qa")
        names = names_in(methods)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed).validate()
        settings = configuration.load(config, overrides(set_))
        what = Knowledge(questions, limit, passages, sampling, minutes)
        with results_in(out):
            retrieval, rows = await run_qa(settings, names, what, out, heads, console)
        if as_json:
            print(json.dumps(msgspec.to_builtins({"retrieval": retrieval, "rows": rows}), indent=2))
        else:
            Console().print(speed_table(rows).rich(), score_table(rows).rich(), retrieval or "")
        return tell_qa_differences(rows, console)

    if run(main()):
        raise typer.Exit(1)


def tell_qa_differences(rows: Sequence[QaRow], console: Console) -> int:
    """A line for every text that differs from plain decoding's by more than rounding; how many there are."""
    different = [row for row in rows if not row.output_equal and not row.tie]
    for row in different:
        console.print(f"different text: {row.setting}, {row.method}, {row.kind} {row.question_id}: {row.difference}")
    return len(different)


def question_files(questions: list[Path] | None) -> list[Path]:
    """What --questions names; ConfigError if that is nothing."""
    if not questions:
        raise ConfigError("--questions: name at least one JSONL file of the Spec-Bench form")
    return questions


def names_in(listed: str) -> list[str]:
    """What a comma-separated option lists."""
    return [name.strip() for name in listed.split(",")]

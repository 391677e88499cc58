"""`talon shapes`, `growth`, `acceptance`, and `profile`: studies of a single part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from engine import config as configuration
from engine.cli.command import ConfigOption, SetOption, one_line_errors, overrides, run
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams

from .options import HeadsOption, QuestionsOption, names_in, question_files

if TYPE_CHECKING:
    from ..inputs.questions import Question


def shapes(
    questions: QuestionsOption = None,
    contestant: Annotated[str, typer.Option(help="One that drafts trees.")] = "talon-tree",
    limit: Annotated[int | None, typer.Option(help="Questions per file.", show_default="all", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    heads: HeadsOption = None,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("tree-shapes.png"),
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """Measure a drafter's trees: width per depth, size, depth and accepted length, suite by suite."""

    async def main() -> None:
        from ..measure.contestants import CONTESTANTS

        if contestant not in CONTESTANTS or contestant == "none":
            raise ConfigError(f"contestant={contestant!r}: drafts no trees; known: {', '.join(CONTESTANTS)}")
        files = question_files(questions)
        from engine.weights.resolve import resolved
        from engine.weights.tokenizer import tokenizer_of

        from ..inputs.questions import read_questions
        from ..simulate.shapes import draw, measure, table

        path = {} if heads is None else {"drafter.path": str(heads / "{method}")}
        settings = configuration.load(config, CONTESTANTS[contestant] | path | overrides(set_))
        read = {file.stem: read_questions(file, limit) for file in files}
        settings = resolved(settings)
        tokenizer = tokenizer_of(settings)
        suites = {suite: _prompts(tokenizer, some) for suite, some in read.items()}
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature).validate()
        answers = measure(settings, suites, sampling, Console(stderr=True))
        straight = [a for a in answers if not a.loops]
        Console().print(table(answers, f"{contestant}, T = {temperature:g}, all answers"))
        Console().print(table(straight, "Answers that do not loop"))
        draw(straight or answers, out)

    run(main())


def _prompts(tokenizer: Any, questions: Sequence[Question]) -> list[list[int]]:
    from engine.text.encode import encode_text

    return [encode_text(tokenizer, question.prompt) for question in questions]


def growth(
    questions: QuestionsOption = None,
    method: Annotated[str, typer.Option(help="The head: block, eagle3, eagle, medusa, hydra.")] = "block",
    path: Annotated[Path | None, typer.Option(help="Its weights.", show_default="drafter.path")] = None,
    limit: Annotated[int, typer.Option(help="Questions per file.", min=1)] = 2,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 96,
    out: Annotated[Path, typer.Option(help="Folder of growth.json and growth.png.")] = Path("growth"),
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """Ask TALON's questions of a head: gate, budget, ungated layers, KV memory, over-confidence."""

    async def main() -> None:
        files = question_files(questions)
        from drafters.heads.head_drafter import HeadDrafter
        from drafters.registry import build
        from engine.model.target import Target
        from engine.weights.resolve import resolved
        from engine.weights.tokenizer import tokenizer_of

        from ..inputs.questions import read_questions
        from ..report.out_folder import results_in
        from ..report.progress import progress_bar
        from ..simulate.growth import position_bytes, replay, settings, time_rounds, write
        from ..simulate.known_answers import record

        named = {"method": method} | ({} if path is None else {"drafter.path": str(path)})
        config_ = resolved(configuration.load(config, named | overrides(set_)))
        console, tokenizer = Console(stderr=True), tokenizer_of(config_)
        suites = {f.stem: _prompts(tokenizer, read_questions(f, limit)) for f in files}
        drafter = build(config_)
        if not isinstance(drafter, HeadDrafter) or not drafter.feature_layers:
            raise ConfigError(f"--method={method}: is no draft head; known: block, eagle3, eagle, medusa, hydra")
        target = Target.of_config(config_)
        round_s = [*time_rounds(target).values()]
        grown, asked = [], [*settings()]
        with results_in(out):
            with progress_bar(console) as progress:
                sampling = SamplingParams(max_tokens=max_tokens)
                answers = record(target, drafter.feature_layers, suites, sampling, progress)
                task = progress.add_task("drafting", total=len(asked))
                for setting in asked:
                    grown.append(replay(drafter.head, setting, answers))
                    progress.advance(task)
            write(out, grown, round_s, position_bytes(target))

    run(main())


def acceptance(
    questions: QuestionsOption = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated; `block+suffix`: a head merged with retrieval.")
    ] = "eagle3,block,eagle,hydra,medusa,sps,pld,suffix,block+suffix,eagle3+suffix",
    limit: Annotated[int | None, typer.Option(help="Questions per file.", show_default="all", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=2)] = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(help="May be given again. 0 is greedy.", show_default="0")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    simulated_ms: Annotated[
        float | None,
        typer.Option(
            help="Simulate an accelerator: a forward takes this long, whatever its rows. Drafts take their own time.",
            show_default="this machine's forwards",
            min=0.001,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of acceptance.json, .md and .png.")] = Path("acceptance"),
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """How far the target follows every method: by position, at the same budget, and cut to what pays.

    The target answers once, then all draft for the same answers, so this takes minutes where `talon bench` takes
    hours. Tokens a round are those that a run would have; speed-ups are computed from the times of drafting and of
    forwards. They leave out prompts and what happens around a round, and no model rests.
    """

    async def main() -> None:
        files = question_files(questions)
        from engine.model.target import Target
        from engine.weights.resolve import resolved
        from engine.weights.tokenizer import tokenizer_of

        from ..inputs.questions import read_questions
        from ..report.out_folder import results_in
        from ..report.progress import progress_bar
        from ..report.records import Accepted
        from ..simulate.acceptance import accept_all, layers_read, tables, ways, write
        from ..simulate.growth import time_rounds
        from ..simulate.known_answers import record

        chosen, console, found = ways(names_in(methods)), Console(stderr=True), list[Accepted]()
        samplings = [
            SamplingParams(max_tokens=max_tokens, temperature=t, seed=seed).validate()
            for t in dict.fromkeys(temperature or [0.0])
        ]
        settings = resolved(configuration.load(config, overrides(set_)))
        layers = layers_read(chosen, settings)
        tokenizer = tokenizer_of(settings)
        suites = {f.stem: _prompts(tokenizer, read_questions(f, limit)) for f in files}
        target = Target.of_config(settings)
        with results_in(out):
            with progress_bar(console) as progress:
                for sampling in samplings:
                    answers = record(target, layers, suites, sampling, progress)
                    found += accept_all(chosen, settings, answers, lambda: time_rounds(target), progress, simulated_ms)
            for table in (shown := tables(found)):
                Console().print(table.rich())
            write(out, found, shown)

    run(main())


def profile(
    rows: Annotated[str, typer.Option(help="Tokens verified in one forward, with commas between.")] = "1,8,16,32",
    behind: Annotated[int, typer.Option(help="Tokens of text before them.", min=1)] = 512,
    repeats: Annotated[int, typer.Option(help="Forwards of each kind, of which the medians are told.", min=1)] = 20,
    out: Annotated[Path, typer.Option(help="The picture, .png or .svg.")] = Path("forward.png"),
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a forward of the target spends its time on, compared with what this machine could do.

    A forward verifies a tree of tokens (rows) after a text. Its parts:

    products   the weight matrices times the rows

    attention  reading the keys and values of the text

    other      norms, rotary positions, gates, copies

    gaps       Python between the calls, in which nothing computes

    Two limits are shown too, measured on the spot: memory allows no forward
    faster than the weights, keys and values can be read once; arithmetic allows
    none faster than its multiplications. Products far above both limits are slow
    kernels; much time outside products means too many small operations. Where
    one row costs as much as eight, speculation is nearly free.

    Examples:

    talon profile --set model=DIR --set dtype=float32 --set verifier.threads=1

    talon profile --rows 1,2,4,8 --behind 2000 --out long.png
    """
    console = Console(stderr=True)
    with one_line_errors():
        asked, settings = _counts(rows), configuration.load(config, overrides(set_))
        from ..speed.profile import draw, loaded, profile_target, show

        with console.status("loading the model"):
            target = loaded(settings)
        found = profile_target(target, asked, behind, repeats, console)
        found.model = settings.model
        show(found, as_json)
        draw(found, out, console)


def _counts(listed: str) -> list[int]:
    try:
        found = [int(count) for count in listed.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > 1024:
        raise ConfigError(f"--rows {listed}: give numbers from 1 to 1024 with commas between, as in 1,8,16,32")
    return list(dict.fromkeys(found))

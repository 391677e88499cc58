"""`talon acceptance` and `talon profile`: measurements of a single part, in this process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine import config as configuration
from engine.cli.command import ConfigOption, SetOption, one_line_errors, overrides, run
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams

from .options import QuestionsOption, names_in, question_files


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
    out: Annotated[Path, typer.Option(help="Folder of acceptance.json and acceptance.md.")] = Path("acceptance"),
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """Compare how far the target follows every method: by position, at the same budget, and cut to what pays.

    The target answers once, then all draft for the same answers, so this takes minutes where `talon bench` takes
    hours. Tokens a round are those that a run would have; speed-ups are computed from the times of drafting and of
    forwards. They leave out prompts and what happens around a round, and no model rests.
    """

    async def main() -> None:
        files = question_files(questions)
        from engine.model.target import Target
        from engine.text.encode import encode_text
        from engine.weights.resolve import resolved
        from engine.weights.tokenizer import tokenizer_of

        from ..inputs.questions import read_questions
        from ..measure.acceptance import Accepted, accept_all, layers_read, tables, time_forwards, ways, write
        from ..measure.known_answers import record
        from ..report.out_folder import results_in
        from ..report.progress import progress_bar

        chosen, console, found = ways(names_in(methods)), Console(stderr=True), list[Accepted]()
        samplings = [
            SamplingParams(max_tokens=max_tokens, temperature=t, seed=seed).validate()
            for t in dict.fromkeys(temperature or [0.0])
        ]
        settings = resolved(configuration.load(config, overrides(set_)))
        layers = layers_read(chosen, settings)
        tokenizer = tokenizer_of(settings)
        suites = {f.stem: [encode_text(tokenizer, q.prompt) for q in read_questions(f, limit)] for f in files}
        target = Target.of_config(settings)
        with results_in(out):
            with progress_bar(console) as progress:
                for sampling in samplings:
                    answers = record(target, layers, suites, sampling, progress)
                    forward_s = partial(time_forwards, target)
                    found += accept_all(chosen, settings, answers, forward_s, progress, simulated_ms)
            for table in (shown := tables(found)):
                Console().print(table.rich())
            write(out, found, shown)

    run(main())


def profile(
    rows: Annotated[str, typer.Option(help="Tokens verified in one forward, with commas between.")] = "1,8,16,32",
    behind: Annotated[int, typer.Option(help="Tokens of text before them.", min=1)] = 512,
    repeats: Annotated[int, typer.Option(help="Forwards of each kind, of which the medians are shown.", min=1)] = 20,
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a forward of the target spends its time on, compared with what this machine could do.

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

    talon profile --rows 1,2,4,8 --behind 2000
    """
    console = Console(stderr=True)
    with one_line_errors():
        asked, settings = _counts(rows), configuration.load(config, overrides(set_))
        from ..measure.profile import loaded, profile_target, show

        with console.status("loading the model"):
            target = loaded(settings)
        found = profile_target(target, asked, behind, repeats, console)
        found.model = settings.model
        show(found, as_json)


def _counts(listed: str) -> list[int]:
    try:
        found = [int(count) for count in listed.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > 1024:
        raise ConfigError(f"--rows {listed}: give numbers from 1 to 1024 with commas between, as in 1,8,16,32")
    return list(dict.fromkeys(found))

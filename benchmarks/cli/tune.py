"""`talon tune` makes a draft head for a model, from what it answers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine import config as configuration
from engine.cli.command import ConfigOption, SetOption, one_line_errors, overrides


def tune(
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='JSONL (or .jsonl.xz) with a "prompt" a line, or "messages" of a chat and its "tools": what you will '
            "ask. Hundreds are good, thousands better.",
            show_default="open prompts that come with Talon",
        ),
    ] = None,
    hours: Annotated[
        float, typer.Option(help="For answers, training and measuring together.", min=0.001, max=1000)
    ] = 2.0,
    at_once: Annotated[int, typer.Option(help="Answers under way at a time.", min=1)] = 32,
    recipe: Annotated[
        Path | None, typer.Option(help="A changed copy of configs/train/tune.yaml.", show_default="that")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Start over, with the answers that there are.")] = False,
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """Make your model faster on this machine: train a draft head on its own answers, and keep it if it pays.

    talon tune --set model=FILE.gguf

    talon tune --set model=FILE.gguf --prompts my-prompts.jsonl --hours 8

    1. The model answers the prompts, many at once: 45% of the time, or until
    all are answered; then again, drawn at a temperature, up to 15%.

    2. A block head learns to foretell the answers from the model's hidden
    states: what is left of the time.

    3. On prompts that it has not seen, plain decoding, `suffix` and `hybrid`
    with the head take turns: 15%.

    4. If answers surely come faster than with the best of the others, the
    head goes into Talon's home (TALON_HOME, else ~/.cache/talon), where the
    engine finds it by the model's weights, in whatever file they are.
    Otherwise one line says by how much it falls short, and what was there
    before stays.

    The text of answers never changes: a head only guesses. Kill it at any
    time: the same command goes on where it stopped. Answers are kept, and a
    longer --hours begins with them. Head, rows and the curve of the training
    stay in Talon's home, under tuning/. Let it have the machine meanwhile.
    """
    with one_line_errors():
        settings = configuration.load(config, overrides(set_))
        from ..tuning.prompts import OPEN_PROMPTS
        from ..tuning.tune import TUNE_RECIPE, Tuning, TuningPlan

        console = Console(stderr=True)
        plan = TuningPlan(settings, prompts or OPEN_PROMPTS, hours, at_once, recipe or TUNE_RECIPE, again)
        try:
            tuning = Tuning(plan, console)
            done = tuning.work()
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from here")
            raise
        options = [] if config == configuration.DEMO else ["--config", str(config)]
        set_again = [f"drafter.{key}=auto" for key in _set_drafter(settings)] if done.pays else []
        options += [part for one in (*(set_ or []), *set_again) for part in ("--set", one)]
        told = Console()
        told.print(done.outcome, highlight=False, markup=False, soft_wrap=True)
        told.print(
            shlex.join(["talon", "serve", *options, "--method", done.method]),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        console.print(f"head, rows and curve: {tuning.run}", highlight=False, markup=False, soft_wrap=True)


def _set_drafter(settings: configuration.Config) -> list[str]:
    """Return the keys that name other heads than those that are found by themselves."""
    drafter = settings.drafter
    given = {"path": drafter.path, "tuned": drafter.tuned, "head": drafter.head}
    return [key for key, value in given.items() if value != configuration.AUTO]

"""`talon train {block,eagle,eagle3,medusa,hydra,sps}` trains a draft head for any target, from prompts alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from engine.core.errors import TalonError

app = typer.Typer(help="Train a draft head for a target.", no_args_is_help=True)

Target = Annotated[str, typer.Option(help="The target: a Hugging Face directory or hub id, a GGUF file, or a name.")]
Data = Annotated[
    Path, typer.Option(help='JSONL (or .jsonl.xz) with a "prompt" per line; "tokens", where there, are its answer.')
]
Out = Annotated[Path, typer.Option(help="Where the head goes; its checkpoints lie in OUT/training.")]
RecipeFile = Annotated[Path | None, typer.Option(help="Recipe, default configs/train/<method>.yaml.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")]
Prompts = Annotated[int | None, typer.Option(min=2, help="Instead of the recipe's.")]
Resume = Annotated[bool, typer.Option(help="Go on from the last checkpoint in OUT.")]
Start = Annotated[
    Path | None,
    typer.Option(help="Folder of a trained head to train longer, or on prompts of your own."),
]
Answers = Annotated[Path | None, typer.Option(help="Folder of generated answers, default OUT/../answers.")]
Minutes = Annotated[
    float | None,
    typer.Option(min=0.01, help="Train this long, not the recipe's steps; the learning rate falls with the time."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
_METHODS = {
    "block": "Talon's block head: a tree of tokens from one forward.",
    "eagle": "EAGLE-1/2: one layer that predicts the target's last hidden state.",
    "eagle3": "EAGLE-3: three fused hidden states, training-time test.",
    "medusa": "Medusa-1: independent heads on the frozen target's last hidden state.",
    "sps": "A small causal LM of the target's vocabulary, distilled from it.",
    "hydra": "Hydra: heads that read the tokens drafted before them, teacher forced.",
}


@contextmanager
def _one_line_errors(stopped: str) -> Iterator[None]:
    """Turn Talon's errors into one line and exit code 2, Ctrl-C into `stopped` and exit code 130."""
    try:
        yield
    except TalonError as error:
        typer.echo(f"talon: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo(f"stopped; {stopped}", err=True)
        raise typer.Exit(130) from None


def _command(method: str) -> None:
    @app.command(method, help=_METHODS[method])
    def command(
        target: Target,
        data: Data,
        out: Out,
        recipe: RecipeFile = None,
        steps: Steps = None,
        prompts: Prompts = None,
        resume: Resume = False,
        start: Start = None,
        answers: Answers = None,
        minutes: Minutes = None,
        device: Device = "auto",
        threads: Threads = None,
    ) -> None:
        from drafters.training.run import train  # torch and transformers take seconds to import

        with _one_line_errors("--resume goes on from the last checkpoint"):
            train(
                method, target, data, out, recipe, steps, prompts, resume, start, answers,
                device=device, threads=threads, minutes=minutes,
            )  # fmt: skip


@app.command("answers", help="The target's answers to prompts, in large batches; `talon train` learns from them.")
def answers(
    target: Target,
    data: Data,
    out: Annotated[Path, typer.Option(help="JSON lines like `talon answer`'s; what is there is not asked again.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 192,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every answer.")] = 0,
    longest: Annotated[int, typer.Option(min=1, help="Longer prompts, in tokens, are left out.")] = 320,
    batch: Annotated[int, typer.Option(min=1, help="Answers at a time: an accelerator takes a thousand.")] = 32,
    minutes: Annotated[float | None, typer.Option(min=0.01, help="Begin no batch that would end later.")] = None,
    device: Device = "auto",
) -> None:
    from rich.console import Console

    from drafters.training.run import answer_file  # torch and transformers take seconds to import
    from engine.core.params import SamplingParams

    with _one_line_errors("the same command goes on from here"):
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens).validate()
        answer_file(target, data, out, sampling, longest, batch, minutes, device, Console())


for _method in _METHODS:
    _command(_method)

"""`talon train {block,eagle,eagle3,medusa,hydra,sps}`: a draft head for any target, from prompts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.errors import TalonError

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
SaveMinutes = Annotated[float, typer.Option(min=0, help="Time between checkpoints.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]


def _command(method: str, summary: str) -> None:
    @app.command(method, help=summary)
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
        save_minutes: SaveMinutes = 3.0,
        device: Device = "auto",
        threads: Threads = None,
    ) -> None:
        from drafters.training.run import train  # torch and transformers take seconds to import

        try:
            train(
                method, target, data, out, recipe, steps, prompts, resume, start, answers, save_minutes, device, threads
            )
        except TalonError as error:
            typer.echo(f"talon: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("stopped; --resume goes on from here", err=True)
            raise typer.Exit(130) from None


_command("block", "Talon's block head: a tree of tokens from one forward.")
_command("eagle", "EAGLE-1/2: one layer that predicts the target's last hidden state.")
_command("eagle3", "EAGLE-3: three fused hidden states, training-time test.")
_command("medusa", "Medusa-1: independent heads on the frozen target's last hidden state.")
_command("sps", "A small causal LM of the target's vocabulary, distilled from it.")
_command("hydra", "Hydra: heads that read the tokens drafted before them, teacher forced.")

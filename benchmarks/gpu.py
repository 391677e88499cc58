"""`python -m benchmarks.gpu`: a checkpoint's evidence on one GPU, from texts to a report. NOT RUN ON A GPU YET.

Are the texts those of plain decoding (`talon check`)? How fast is one request (T = 0 and 1), and how fast are 1 to 64
at once? What would verification and drafting cost at Llama-3.1-8B shapes, with random weights, which say nothing of
text or acceptance? With --data it first trains heads on the model's own answers. On a CPU it takes the same steps,
with toy shapes for the costs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from drafters import requirements
from engine import config as configuration
from engine.config import Config
from engine.errors import TalonError
from engine.sampling import SamplingParams

from .bench import Single, run_bench, summary
from .check import Grid, run_check
from .costs import LLAMA_8B, TOY, cost_table, time_drafting, time_verification
from .differences import tell_differences, tell_load_differences
from .equality import errors, table
from .figures import BASELINE
from .load import Load, run_load, settings_of
from .load_figures import level_table, levels
from .options import HeadsOption, names_in, question_files
from .out_folder import write_report

SINGLE = "none,pld,suffix,recycling,eagle3,block,talon-suffix,talon-tree,hybrid,talon,hf,hf-pld"
SERVED = "suffix,eagle3,block,talon"
LEVELS = (1, 2, 4, 8, 16, 32, 64)
_CHECKED = 2  # questions per file whose texts are checked with every served method


def main(
    model: Annotated[str, typer.Option(help="Checkpoint directory, or a name that talon models knows.")],
    questions: Annotated[list[Path], typer.Option(help="JSONL file of the Spec-Bench form; may be given again.")],
    out: Annotated[Path, typer.Option(help="Folder for rows, pictures, report and costs.")] = Path("out-gpu"),
    minutes: Annotated[float, typer.Option(help="Measuring, half of it one request, half of it many.", min=0)] = 16.0,
    heads: HeadsOption = None,
    data: Annotated[
        Path | None, typer.Option(help='JSONL (or .xz) with a "prompt" per line: train --train heads on them first.')
    ] = None,
    train: Annotated[str, typer.Option(help="Comma-separated heads to train, into OUT/heads.")] = "eagle3,block",
    prompts: Annotated[int | None, typer.Option(help="To train on.", show_default="the recipe's", min=1)] = None,
    steps: Annotated[int | None, typer.Option(help="Of a training.", show_default="the recipe's", min=1)] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated contestants, one request at a time.")] = SINGLE,
    served: Annotated[str, typer.Option(help="Comma-separated methods: checked, and measured with many.")] = SERVED,
    at_once: Annotated[str, typer.Option(help="Comma-separated numbers of requests.")] = ",".join(map(str, LEVELS)),
    limit: Annotated[int | None, typer.Option(help="Questions per file.", show_default="all", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
) -> None:
    """Check, measure and report one checkpoint on this machine's GPU, or on its CPU."""
    console, device = Console(), "cuda" if torch.cuda.is_available() else "cpu"
    try:
        questions = question_files(questions)
        out.mkdir(parents=True, exist_ok=True)
        if data is not None:
            heads = out / "heads"
            _train(model, data, names_in(train), heads, prompts, steps, device)
        settings = configuration.load({"model": model, "device": device, "dtype": "bfloat16"})
        where = {} if heads is None else {"drafter.path": str(heads / "{method}")}
        settings = configuration.load(settings, where)
        sampling = SamplingParams(max_tokens=max_tokens).validate()
        wrong = asyncio.run(_check(settings, names_in(served), questions, sampling, out, console))
        samplings = [sampling, SamplingParams(max_tokens=max_tokens, temperature=1.0)]
        single = Single(questions, limit, samplings, minutes=minutes / 2)
        wrong += asyncio.run(_measure(settings, names_in(methods), single, out, heads, console))
        several = Load([int(level) for level in names_in(at_once)], (), sampling, 1, minutes / 2)
        wrong += asyncio.run(_measure_many(settings, names_in(served), questions, limit, several, out, heads, console))
        write_report(out, console)
        _time_costs(device, out, console)
    except TalonError as error:
        typer.echo(f"talon: {error}", err=True)
        raise typer.Exit(2) from None
    if wrong:
        raise typer.Exit(1)


def _train(
    model: str, data: Path, names: list[str], heads: Path, prompts: int | None, steps: int | None, device: str
) -> None:
    from drafters.training.run import train

    for name in names:
        train(name, model, data, heads / name, steps=steps, prompts=prompts, device=device)


async def _check(
    config: Config, names: list[str], files: list[Path], sampling: SamplingParams, out: Path, console: Console
) -> int:
    """Compare the texts of every available method; the table is saved as `out`/check.txt."""
    here = [BASELINE]
    for name in names:
        try:
            requirements.check(settings_of(name, config))
            here.append(name)
        except TalonError as error:
            console.print(f"left out: {name}: {error}")
    grid = Grid(here, ["sequential", "async"], ["inproc"], [config.verifier.threads], [sampling.temperature])
    comparisons = await run_check(config, grid, files, _CHECKED, sampling, None, console)
    shown, wrong = table(comparisons), errors(comparisons)
    console.print(shown.rich(), *wrong)
    (out / "check.txt").write_text(shown.markdown() + "\n" + "\n".join(wrong), encoding="utf8")
    return len(wrong)


async def _measure(
    config: Config, names: list[str], what: Single, out: Path, heads: Path | None, console: Console
) -> int:
    rows = await run_bench(config, names, what, out, heads, console)
    console.print(summary(rows).rich())
    return tell_differences(rows, console)


async def _measure_many(
    config: Config, names: list[str], files: list[Path], limit: int | None, what: Load, out: Path, heads: Path | None,
    console: Console,
) -> int:  # fmt: skip
    rows = await run_load(config, names, files, out, limit, what, heads, console)
    console.print(level_table(levels(rows)).rich())
    return tell_load_differences(rows, console)


def _time_costs(device: str, out: Path, console: Console) -> None:
    shapes = LLAMA_8B if device == "cuda" else TOY
    costs = cost_table(time_verification(shapes, device), time_drafting(shapes, device), shapes, device)
    console.print(costs)
    with (out / "costs.txt").open("w", encoding="utf8") as file:
        Console(file=file, width=120).print(costs)


if __name__ == "__main__":
    typer.run(main)

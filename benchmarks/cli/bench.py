"""`talon bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine import config as configuration
from engine.cli.command import ConfigOption, SetOption, overrides, run
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams

from ..report.figures import Row
from ..report.out_folder import compare_runs, results_in
from ..report.runs import Run
from .options import (
    AgainstOption,
    DraftOption,
    GgufOption,
    HeadsOption,
    MinutesOption,
    QuestionsOption,
    RivalsOption,
    names_in,
    numbers_in,
    question_files,
    rivals_in,
)

_READ_BYTES = 1 << 30  # of memory, to see how fast it is read: more than any cache holds
_OF_ITS_OWN = (
    "these were six prompts of its own, of which two ask for an edit of a text that they give, where drafts pay most: "
    "--questions takes yours"
)


def bench(
    questions: QuestionsOption = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated contestants, or all, or ablation; a wrong name lists them. pld, suffix, eagle3, ... "
            "are as published, every node verified; talon-pld, talon-suffix and talon as Talon serves them."
        ),
    ] = "none,pld,talon-suffix",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Five minutes (or --minutes): should speculation be on for this model, with these prompts, on this "
            "machine? Ends with the line to paste. Without --questions it asks six prompts of its own.",
        ),
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Questions per file.", show_default="all", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(help="May be given again: a table each.", show_default="0")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling and of the order of contestants.")] = 0,
    repeats: Annotated[
        int, typer.Option(help="How often everything is run, each time afresh; medians count.", min=1)
    ] = 1,
    minutes: MinutesOption = None,
    against: AgainstOption = None,
    heads: HeadsOption = None,
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl and the report.")] = Path("out"),
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
            "16 at once, which is measured first; with --server, at these numbers a second. Goodput counts answers "
            "whose first token came within 1 s and whose others within 0.1 s each.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure a server that speaks OpenAI's API instead, with --concurrency clients at once or --arrivals: "
            "tokens/s, time to the first token, refusals, failures. Its key is OPENAI_API_KEY. Rows: clients.jsonl.",
        ),
    ] = None,
    rivals: RivalsOption = None,
    gguf: GgufOption = None,
    draft: DraftOption = None,
    config: ConfigOption = configuration.DEMO,
    set_: SetOption = None,
) -> None:
    """Compare contestants on question files: tokens/s, speed-up over plain decoding, MAT, equality of texts.

    talon bench --quick --set model=FILE.gguf --questions my-prompts.jsonl

    talon bench --questions gsm8k.jsonl --methods none,pld,talon-suffix --limit 10

    talon bench --questions gsm8k.jsonl --questions sum.jsonl --concurrency 1,4,16 --repeats 3
    """
    console = Console(stderr=True)

    async def main() -> int:
        from ..measure.contestants import ABLATION, every, without_effect
        from ..measure.plan import MeasurementPlan
        from . import parts

        if quick:
            return await measure_quickly()
        groups = {"all": every(), "ablation": list(ABLATION)}
        names = groups.get(methods) or names_in(methods)
        given = overrides(set_)
        settings = configuration.load(config, given)
        samplings = [
            SamplingParams(max_tokens=max_tokens, temperature=value, seed=seed).validate()
            for value in temperature or [0.0]
        ]
        levels = [int(level) for level in numbers_in("concurrency", concurrency, whole=True)]
        shares = numbers_in("arrivals", arrivals)
        if (levels or shares) and len(samplings) > 1:
            raise ConfigError("--temperature: give one with --concurrency and --arrivals")
        for line in without_effect(names, given, as_served=bool(levels or shares or rivals)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if against is not None:
            Run.read(against)  # a folder that cannot be read is refused before anything is measured
        with results_in(out):
            if server is not None:
                return await measure_server(server, levels, shares, samplings[0])
            others = rivals_in(rivals, gguf, draft)
            plan = MeasurementPlan(
                settings, names, question_files(questions), out, samplings, limit, repeats, minutes, heads
            )
            if others is not None:
                failed = await parts.baselines(plan, levels or [1, 8], others, console)
            elif levels or shares:
                failed = await parts.load(plan, levels, shares, console)
            else:
                failed, _ = await parts.single(plan, console)
            if against is not None:
                compare_runs(out, against, Console())
            return failed

    async def measure_quickly() -> int:
        from engine.kernels.gemm.matmul import units
        from engine.model.loading import find_device

        from ..inputs.sample_prompts import write_sample_prompts
        from ..measure.plan import MeasurementPlan
        from ..report.recommendation import SERVED, activations_told, recommendation
        from . import parts

        settings = configuration.load(config, overrides(set_))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=(temperature or [0.0])[0], seed=seed).validate()
        both = settings.activations == configuration.AUTO and _has_choice(settings)
        share = (minutes or 5.0) / (2 if both else 1)

        async def measure(settings: configuration.Config, folder: Path) -> tuple[int, list[Row]]:
            with results_in(folder):
                files = question_files(questions or [write_sample_prompts(folder / "prompts.jsonl")])
                plan = MeasurementPlan(
                    settings, [*SERVED], files, folder, [sampling], limit, minutes=share, heads=heads
                )
                return await parts.single(plan, console)

        failed, rows = await measure(settings, out)
        if both and rows and rows[0].weights not in ("bfloat16", "float32"):
            other = "bfloat16" if rows[0].activations == "int8" else "int8"
            wrong, others = await measure(configuration.load(settings, {"activations": other}), out / other)
            failed += wrong
            if others:
                console.print(activations_told(rows, others), highlight=False, markup=False, soft_wrap=True)
        options = [] if config == configuration.DEMO else ["--config", str(config)]
        options += [part for one in set_ or [] for part in ("--set", one)]
        Console().print(recommendation(rows, options), highlight=False, markup=False, soft_wrap=True)
        if find_device(settings.device).type == "cpu" and units():
            console.print(_most_like(), highlight=False, markup=False, soft_wrap=True)
        if not questions:
            console.print(_OF_ITS_OWN, highlight=False, soft_wrap=True)
        return failed

    async def measure_server(url: str, levels: list[int], rates: list[float], sampling: SamplingParams) -> int:
        from ..measure.clients import failures, run_clients, table

        clients = levels or ([] if rates else [1, 4, 8, 16, 64])
        done = await run_clients(url, question_files(questions), limit, clients, rates, sampling, out)
        Console().print(table(url, done).rich())
        for line in failures(done):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print(f"rows: {out / 'clients.jsonl'}")
        return 0

    if run(main()):
        raise typer.Exit(1)


def _most_like() -> str:
    """Return which of the published processors this one is most like, after a look at its memory."""
    import torch

    from engine.core.processor import cores
    from engine.kernels.gemm.matmul import units

    from ..measure.machine_limits import Limits
    from ..report.published import most_like

    torch.set_num_threads(cores())
    limits = Limits(_READ_BYTES, torch.bfloat16, torch.device("cpu"))
    limits.measure()
    return most_like(units()[0], cores(), limits.bytes_per_s / 1e9)


def _has_choice(settings: configuration.Config) -> bool:
    """Return whether the model can take its rows in both ways."""
    from engine.model.loading import find_device, open_stored
    from engine.model.trial.activations import has_choice
    from engine.weights.resolve import target_folder

    stored = open_stored(Path(target_folder(settings))) if find_device(settings.device).type == "cpu" else None
    return stored is not None and has_choice(stored)

"""`talon answer` writes the model's answers to a file of prompts, as JSON lines for index builds and training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from engine import config as configuration
from engine.cli.command import ConfigOption, SetOption, overrides, run
from engine.core.errors import RequestError, RequestFailed
from engine.core.params import SamplingParams
from engine.files.answer_rows import AnswerRow, open_answers
from engine.files.prompt_file import read_prompts
from engine.frontend.tasks import keep_under_way

if TYPE_CHECKING:
    from engine.api import Engine
    from engine.frontend.prompts import Prompt


async def answer_all(
    engine: Engine,
    prompts: Iterable[tuple[str, Prompt]],
    out: Path,
    model: str,
    sampling: SamplingParams,
    at_once: int,
    report: Callable[[int], None] = lambda done: None,
) -> dict[str, str]:
    """Append an AnswerRow to `out` for each prompt, in order of completion, `at_once` running at a time.

    Returns the reason for each refused prompt (one beyond the model's context, say), by its name. prompts: each with
    the name that it has in the file, taken when there is room for another. model: as configured, for the rows. report:
    called with how many are done.
    """
    refused: dict[str, str] = {}
    ended = 0
    with out.open("ab") as file:

        async def answer_one(named: tuple[str, Prompt]) -> None:
            nonlocal ended
            name, prompt = named
            try:
                result = await engine.generate(prompt, sampling)
            except (RequestError, RequestFailed) as error:
                refused[name] = str(error)
            else:
                row = AnswerRow.of(name, model, sampling, result.finish_reason, result.text, result.token_ids)
                file.write(msgspec.json.encode(row) + b"\n")
                file.flush()
            ended += 1
            report(ended)

        await keep_under_way(at_once, prompts, answer_one)
    return refused


def answer(
    prompts: Annotated[Path, typer.Option(help='JSON lines with a "prompt", a text; plain or .xz.')],
    out: Annotated[
        Path, typer.Option(help="JSON lines of answers; what is there already, of this model, is not asked again.")
    ],
    config: ConfigOption = configuration.DEMO,
    method: Annotated[str | None, typer.Option(help="Who drafts; the answers are the same with every method.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every answer.")] = 0,
    at_once: Annotated[int, typer.Option(help="Requests under way at a time.", min=1)] = 16,
    set_: SetOption = None,
) -> None:
    """Answer a file of prompts, many at once. After a crash, run it again to continue where it stopped.

    `talon index build --input OUT` turns the answers into a datastore for drafter.answers;
    `talon train block --data OUT` trains a head on them.
    """

    async def main() -> None:
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens).validate()
        settings = configuration.load(config, overrides(set_, method=method))
        asked = dict.fromkeys(row.prompt for row in read_prompts(prompts, "prompts"))
        done = open_answers(out, settings.model, sampling)
        left = [prompt for prompt in asked if prompt not in done]
        from engine.api import Engine  # takes seconds, so options are checked first
        from engine.files.progress import shown

        refused: dict[str, str] = {}
        if left:
            async with await Engine.start(settings) as engine:
                with shown() as bar:
                    refused = await answer_all(
                        engine,
                        [(prompt, prompt) for prompt in left],
                        out,
                        settings.model,
                        sampling,
                        at_once,
                        lambda ended: bar("prompts", ended, len(left)),
                    )
        for prompt, reason in refused.items():
            typer.echo(f"talon: not answered: {prompt[:40]!r}: {reason}", err=True)
        typer.echo(f"{out}: {len(asked) - len(refused):,} of {len(asked):,} prompts answered")

    run(main())

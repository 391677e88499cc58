"""JSON under a schema, with and without drafts: how many answers are valid, and how much faster they come.

`python -m benchmarks.structured --method suffix` prints one line a schema and one for all of them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from engine import Engine, Grammar, SamplingParams, Speculation
from engine.answer import Result
from engine.command import SetOption, overrides, run

from .schemas import SCHEMAS


def valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether `text` is JSON that the schema accepts, by another library than the one that enforced it."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def sampling_of(schema: dict[str, Any], temperature: float, drafted: bool) -> SamplingParams:
    return SamplingParams(
        max_tokens=512,
        temperature=temperature,
        grammar=Grammar(json_schema=schema),
        speculation=None if drafted else Speculation(off=True),
    )


def prompt_of(question: str, schema: dict[str, Any]) -> str:
    """The prompt as people write it, with the schema in it."""
    return f"{question} Answer in JSON that follows this schema:\n{json.dumps(schema)}"


async def pair(engine: Engine, name: str, temperature: float) -> tuple[Result, Result]:
    """The answer without drafts and the one with them."""
    question, schema = SCHEMAS[name]
    prompt = prompt_of(question, schema)
    plain, drafted = [
        await engine.generate(prompt, sampling_of(schema, temperature, drafted)) for drafted in (False, True)
    ]
    return plain, drafted


def main(
    method: Annotated[str, typer.Option(help="Who drafts.")] = "suffix",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    limit: Annotated[int, typer.Option(help="Schemas to ask for.")] = len(SCHEMAS),
    set_: SetOption = None,
) -> None:
    """Ask for every schema twice, and compare."""

    async def ask() -> None:
        total = {False: 0.0, True: 0.0}
        tokens = right = 0
        async with await Engine.start({}, **overrides(set_, method=method)) as engine:
            await engine.generate("Yes or no?", SamplingParams(grammar=Grammar(regex="yes|no")))  # loads the tokenizer
            for name in list(SCHEMAS)[:limit]:
                plain, drafted = await pair(engine, name, temperature)
                assert plain.token_ids == drafted.token_ids, name
                ok = valid(drafted.text, SCHEMAS[name][1])
                right, tokens = right + ok, tokens + len(drafted.token_ids)
                seconds = [_decoding_s(result) for result in (plain, drafted)]
                total[False], total[True] = total[False] + seconds[0], total[True] + seconds[1]
                print(
                    f"{name:10} {'valid' if ok else 'NOT VALID'} {len(drafted.token_ids):4} tokens, "
                    f"MAT {drafted.metrics.mean_accepted_tokens:.2f}, {seconds[0] / seconds[1]:.2f}x",
                    flush=True,
                )
        print(
            f"{method} at T={temperature:g}: {right} of {min(limit, len(SCHEMAS))} valid, "
            f"{tokens / total[False]:.1f} -> {tokens / total[True]:.1f} tokens/s behind the prompt, "
            f"{total[False] / total[True]:.2f}x"
        )

    run(ask())


def _decoding_s(result: Result) -> float:
    """Seconds from the first token to the last."""
    return sum(round_.round_us for round_ in result.rounds[1:]) / 1e6


if __name__ == "__main__":
    typer.run(main)

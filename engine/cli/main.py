"""The `talon` command."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from drafters.requirements import check_paths
from engine import config as configuration
from engine.cli import options
from engine.cli.command import MODELS_OWN, ConfigOption, SetOption, overrides, run
from engine.commit import commit_of
from engine.core.errors import RequestError
from engine.core.params import SamplingParams
from engine.frontend.processes import POOL_WAITS
from engine.install_paths import BENCHMARKS, ROOT
from engine.sampling.matcher import check as check_grammar
from engine.weights.resolve import with_own

if TYPE_CHECKING:
    from engine.answer import Result
    from engine.api import Stream

app = typer.Typer(
    help="Talon: faster answers from large language models, not one token changed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

_MEASUREMENTS = (
    ("cli.bench", "bench"),
    *(("cli.checks", name) for name in ("check", "report", "qa")),
    *(("cli.studies", name) for name in ("acceptance", "profile")),
    ("cli.evidence", "evidence"),
    ("cli.tune", "tune"),
)
"""Commands of the benchmarks package, as (module, command)."""


def _show_version(wanted: bool) -> None:
    if wanted:
        commit = commit_of(ROOT)
        typer.echo(f"talon {version('talon-decoding')}" + (f", built from commit {commit}" if commit else ""))
        raise typer.Exit


@app.callback()
def talon(
    version_: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print Talon's version and the commit that it was built from.",
            is_eager=True,
            callback=_show_version,
        ),
    ] = False,
) -> None:
    """Talon: faster answers from large language models, not one token changed."""


@app.command()
def generate(
    prompt: Annotated[
        str,
        typer.Argument(help="The question, - for standard input; sent as one user message through the chat template."),
    ],
    config: ConfigOption = configuration.DEMO,
    method: Annotated[
        str | None,
        typer.Option(help="Who drafts: none, pld, suffix, eagle3, hybrid, ...; a wrong name lists them all."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens of this much probability.", show_default=MODELS_OWN)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.", show_default=MODELS_OWN)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Keep tokens of this share of the likeliest one's probability.", show_default=MODELS_OWN),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Over 1, discourage tokens already in prompt and answer.", show_default=MODELS_OWN),
    ] = None,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = None,
    logprobs: options.Logprobs = None,
    prompt_logprobs: options.PromptLogprobs = None,
    json_object: options.JsonObject = False,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.GrammarText = None,
    no_speculation: options.SpeculationOff = False,
    budget: options.Budget = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Answers, with seeds that count on from --seed.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text with every method and mode.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="Drafter and verifier in turns or at once: sequential, async, auto.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write what each worker did when, for ui.perfetto.dev.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Answer a prompt, streaming the text; a summary line follows on standard error."""

    async def main() -> None:
        sampling = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=options.bias_of(logit_bias),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=options.grammar_of(json_object, json_schema, regex, grammar),
            speculation=options.speculation_of(no_speculation, budget),
        ).validate()
        if not as_json and (logprobs is not None or prompt_logprobs is not None):
            raise RequestError("--logprobs, --prompt-logprobs: are shown with --json; add it")
        given = overrides(set_, method=method, mode=mode, trace=str(trace) if trace else None)
        settings = configuration.load(config, given)
        check_paths(with_own(settings))
        asked = _standard_input() if prompt == "-" else prompt
        if not asked:
            raise RequestError("prompt: is empty; give a text, or - to read one from standard input")
        if sampling.grammar is not None:
            check_grammar(sampling.grammar)
        if n > 1 and sampling.greedy:
            print("talon: greedy decoding gives the same answer n times; set --temperature", file=sys.stderr)
        if sys.stderr.isatty():
            print(f"talon: loading {settings.model}", file=sys.stderr)
        from engine.api import Engine  # takes seconds, so options are checked first

        async with await Engine.start(settings) as engine:
            if n == 1 and not as_json:
                results = [await _show(engine.stream(asked, sampling, raw=raw))]
            else:
                results = await engine.generate_choices(asked, n, sampling, raw=raw)
        for i, result in enumerate(results):
            if as_json:
                asked_of = {"model": settings.model, "method": settings.method, "seed": sampling.of_choice(i).seed}
                shown = {key: value for key, value in msgspec.to_builtins(result).items() if key != "rounds"}
                print(msgspec.json.encode(shown | asked_of).decode())
                continue
            if n > 1:
                print(f"[{i + 1} of {n}, seed {sampling.of_choice(i).seed}]\n{result.text}")
            print(_summary(result, engine.config), file=sys.stderr)

    run(main())


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"prompt: standard input is no text in {error.encoding}; convert it") from None


async def _show(stream: Stream) -> Result:
    """Print an answer as it comes."""
    async with stream:
        async for piece in stream:
            print(piece.text, end="", flush=True)
    print(flush=True)
    assert stream.result is not None
    return stream.result


def _summary(result: Result, config: configuration.Config) -> str:
    metrics = result.metrics
    accepted = f"{metrics.mean_accepted_tokens:.2f}" if metrics.rounds else "-"  # the prompt's forward is no round
    return (
        f"[{len(result.token_ids)} tokens, {metrics.tokens_per_second:.1f} tokens/s, "
        f"MAT {accepted}, verifier busy {metrics.verifier_busy:.0%}, "
        f"{config.method}, {result.finish_reason}{config.simulation}]"
    )


def assemble() -> typer.Typer:
    """Return the command with all its subcommands. `engine.__main__` calls it."""
    for key, value in POOL_WAITS.items():
        os.environ.setdefault(key, value)  # applies to workers that are threads
    from drafters.training.cli import app as train
    from engine.cli.answer_file import answer
    from engine.cli.connect import connect
    from engine.cli.index import app as index
    from engine.cli.models import app as models
    from engine.cli.remote import drafter, keys
    from engine.server.command import serve

    app.command()(answer)
    app.command()(serve)
    app.command()(connect)
    for home, name in _MEASUREMENTS:
        app.command()(getattr(import_module(f"{BENCHMARKS}.{home}"), name))
    app.command()(keys)
    app.command()(drafter)
    app.add_typer(models, name="models")
    app.add_typer(index, name="index")
    app.add_typer(train, name="train")
    return app

"""`talon replay`: what retrieval drafting would yield on recorded answers, with no target model.

The recorded answer stands in for the target: a round accepts the drafted path that the answer follows, and one more
token of the answer is the bonus. Requests run one after the other and share what the drafter keeps across requests.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from engine.cli.index import find_tokenizer
from engine.core.drafter_protocol import Drafter, Verdict
from engine.core.errors import ConfigError, TalonError
from engine.core.params import SamplingParams
from engine.files.json_lines import BadLine, json_lines

from ..simulate.followed_answer import followed
from .options import names_in


class RecordedConversation(msgspec.Struct):
    """One line of a trace: a conversation's questions and its answers."""

    turns: list[str]
    answers: list[str]


class Replayed(msgspec.Struct):
    """mean_accepted_tokens: tokens a round, bonus included. expected_tokens: what the trees' confidence promised, which
    equals mean_accepted_tokens where it is calibrated. The others: microseconds; append is per token.
    """

    mean_accepted_tokens: float
    expected_tokens: float
    query_us_p50: float
    query_us_p99: float
    append_us_p50: float


def methods(budget: int) -> dict[str, Callable[[], Drafter]]:
    """The drafters that need no model, each with trees of at most `budget` candidates (not counting the root)."""
    from drafters.lookup.prompt_lookup import PromptLookup
    from drafters.lookup.recycling import TokenRecycling
    from drafters.lookup.suffix import SuffixDrafter

    return {
        "pld": lambda: PromptLookup(length=min(10, budget)),
        "suffix": lambda: SuffixDrafter(budget=budget + 1),
        "suffix-own": lambda: SuffixDrafter(budget=budget + 1, capacity=0),
        "recycling": lambda: TokenRecycling(budget=budget + 1),
    }


def requests(trace: Path, tokenizer: Any, limit: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """The (prompt, answer) token ids of the first `limit` answers, the turns before them being part of the prompt."""
    count = 0
    try:
        with open(trace, "rb") as file:
            for _, recorded in json_lines(file, RecordedConversation):
                text = ""
                for turn, answer in zip(recorded.turns, recorded.answers, strict=False):
                    if count == limit:
                        return
                    count += 1
                    text += f"USER: {turn} ASSISTANT: "
                    yield tokenizer.encode(text), tokenizer.encode(answer, add_special_tokens=False)
                    text += f"{answer} "
    except BadLine as error:
        raise ConfigError(f"trace={trace}: {error}: need turns and answers") from None


def replay_drafter(drafter: Drafter, answers: list[tuple[list[int], list[int]]]) -> Replayed:
    """Run one drafter over the answers in order."""
    rounds, emitted, promised = 0, 0, 0.0
    query_us, append_us = [], []
    for request, (prompt, answer) in enumerate(answers):
        drafter.start(request, prompt, SamplingParams())
        for tree, path, tokens, draft_s in followed(answer, functools.partial(drafter.propose, request)):
            verdict = Verdict(tree, path, tokens)
            verified = time.perf_counter()
            drafter.observe(request, verdict)
            query_us.append(1e6 * draft_s)
            append_us.append(1e6 * (time.perf_counter() - verified) / len(tokens))
            rounds, emitted = rounds + 1, emitted + len(tokens)
            promised += float(tree.confidence.sum())
        drafter.finish(request)
    if not rounds:
        raise ConfigError("trace: holds no answer")
    return Replayed(
        emitted / rounds,
        promised / rounds,
        statistics.median(query_us),
        sorted(query_us)[int(0.99 * len(query_us))],
        statistics.median(append_us),
    )


_METHODS_HELP = "Comma-separated; suffix-own: suffix without what it remembers of earlier answers."


def replay(
    trace: Annotated[Path, typer.Option(help="JSONL of recorded conversations: turns and answers.")],
    tokenizer: Annotated[Path, typer.Option(help="Directory of the tokenizer.")],
    names: Annotated[str, typer.Option("--methods", help=_METHODS_HELP)] = "pld,suffix,suffix-own,recycling",
    limit: Annotated[int | None, typer.Option(help="Answers to replay.", show_default="all", min=1)] = None,
    budget: Annotated[int, typer.Option(help="Candidate tokens a round.", min=1, max=1023)] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What retrieval would give on recorded answers, without a model: tokens a round (MAT), how many the trees'
    confidences promised, and lookup times.
    """
    try:
        listed = names_in(names)
        results = _run(trace, tokenizer, listed, limit, budget)
    except TalonError as error:
        typer.echo(f"talon: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps({name: msgspec.to_builtins(result) for name, result in results.items()}, indent=2))
        return
    typer.echo(f"{'method':<14}{'MAT':>8}{'promised':>10}{'query us p50':>14}{'p99':>9}{'append us':>11}")
    for name, r in results.items():
        typer.echo(
            f"{name:<14}{r.mean_accepted_tokens:>8.3f}{r.expected_tokens:>10.3f}{r.query_us_p50:>14.1f}"
            f"{r.query_us_p99:>9.1f}{r.append_us_p50:>11.1f}"
        )


def _run(trace: Path, tokenizer: Path, names: list[str], limit: int | None, budget: int) -> dict[str, Replayed]:
    known = methods(budget)
    for name in names:
        if name not in known:
            raise ConfigError(f"methods={name!r}: unknown method; known: {', '.join(known)}")
    if not trace.is_file():
        raise ConfigError(f"trace={trace}: no such file")
    answers = list(requests(trace, find_tokenizer(tokenizer), limit))
    return {name: replay_drafter(known[name](), answers) for name in names}

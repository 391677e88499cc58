"""Talon's methods against other engines: the same prompts, greedy, the same cores, in turn.

Talon takes part with both kinds of activations, so that each engine finds one that multiplies as it does.

Prompts are token ids, so every engine reads the same text. A contestant answers all prompts of a turn, several at once;
tokens a second count the time from the first prompt to the last token, prompts included.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console

from engine.api import Engine
from engine.config import Config, load
from engine.core.errors import ConfigError, TalonError
from engine.core.params import SamplingParams
from engine.core.processor import cores
from engine.frontend.tasks import keep_under_way
from engine.model.loading import dtype_of, load_model, name_of
from engine.weights.gguf_source import open_gguf
from engine.weights.tokenizer import load_tokenizer

from ..inputs.questions import check_prompts, mixed_questions
from ..measure.budget import Budget, is_narrow
from ..measure.load import engines
from ..measure.plan import MeasurementPlan
from ..report.engine_figures import ROWS, Turn, ratios
from ..report.load_figures import at_once
from .engines import Baseline, Given, Missing, Process, baselines
from .gguf import file_type
from .rivals import Rivals

Prompts = Sequence[Sequence[int]]
_LEAST, _ROUNDS = 6, 3  # prompts of a turn: at least, and for each request at once
_MOST = 20  # repeats
_ACTIVATIONS = "bfloat16", "int8"


def turns(
    levels: Sequence[int],
    prompts: Prompts,
    repeats: int,
    budget: Budget,
    ratios: Callable[[int], Iterable[Sequence[float]]],
) -> Iterator[tuple[int, int, Prompts]]:
    """(repeat, requests at once, prompts). Each turn takes the next prompts, so that as few as possible repeat.

    With a bounded budget there are as many repeats as it allows, of the levels whose intervals are not narrow yet.
    ratios: at a level, of each contestant so far.
    """
    endless = itertools.cycle(prompts)
    for repeat in range(_MOST if budget.bounded else repeats):
        open_ = [level for level in levels if not repeat or not all(map(is_narrow, ratios(level)))]
        for level in levels if not budget.bounded else open_:
            if repeat and budget.spent:
                return
            yield repeat, level, [*itertools.islice(endless, max(_LEAST, _ROUNDS * level))]


class Rival(Protocol):
    """What takes turns: one of Talon's engines, or another."""

    @property
    def name(self) -> str: ...

    @property
    def weights(self) -> str: ...

    @property
    def activations(self) -> str: ...

    async def answer(self, prompts: Prompts, max_tokens: int, at_once: int) -> tuple[float, list[int]]:
        """Seconds for all prompts, and the tokens of each answer."""


@dataclass(frozen=True)
class Own:
    """One of Talon's engines."""

    name: str
    weights: str
    activations: str
    engine: Engine

    async def answer(self, prompts: Prompts, max_tokens: int, at_once: int) -> tuple[float, list[int]]:
        tokens = [0] * len(prompts)

        async def one(place: int) -> None:
            result = await self.engine.generate([*prompts[place]], SamplingParams(max_tokens=max_tokens))
            tokens[place] = len(result.token_ids)

        started = time.perf_counter()
        await keep_under_way(at_once, range(len(prompts)), one)
        return time.perf_counter() - started, tokens


async def run_baselines(plan: MeasurementPlan, levels: Sequence[int], rivals: Rivals, console: Console) -> list[Turn]:
    """Measure, and write rivals.jsonl as the turns end. levels: requests at once."""
    if plan.sampling.temperature != 0:
        raise ConfigError("--temperature: rivals are compared at 0 only; leave it out with --rivals")
    plan = plan.resolved()
    asked = [plan.encoded(suite, question) for suite, question in mixed_questions(plan.files, plan.limit)]
    budget = Budget(plan.minutes)
    found: list[Turn] = []
    order = turns(levels, [one.prompt for one in asked], plan.repeats, budget, lambda n: _ratios(found, n))
    with tempfile.TemporaryDirectory(prefix="talon-rivals-") as made, plan.row_file(ROWS) as file:
        given = _given(rivals, plan.config, Path(made), max(levels))
        async with AsyncExitStack() as running:
            ours = [
                Own(name, weights_of(plan.config), activations, engine)
                for activations in _ACTIVATIONS
                for name, engine in (
                    await running.enter_async_context(
                        engines(plan.contestants, load(plan.config, {"activations": activations}), plan.heads, console)
                    )
                ).items()
            ]
            check_prompts(asked, plan.sampling.max_tokens, ours[0].engine.target.context)
            others = baselines(rivals.folder, given)
            async with aclosing(compare(ours, others, order, plan.sampling.max_tokens, console)) as taken:
                async for turn in taken:
                    found.append(turn)
                    file.write(turn)
    return found


async def compare(
    ours: Sequence[Own],
    others: Sequence[Baseline | Missing],
    order: Iterator[tuple[int, int, Prompts]],
    max_tokens: int,
    console: Console,
) -> AsyncGenerator[Turn, None]:
    """Let all contestants take turns. Engines that cannot be started are named and left out; so are those that fail
    later, from then on.
    """
    drawn = random.Random(0)
    async with AsyncExitStack() as running:
        taking_part: list[Rival] = [*ours]
        for other in others:
            if isinstance(other, Missing):
                console.print(f"left out: {other.name}: not installed: {other.reason}")
                continue
            try:
                taking_part.append(process := await Process.start(other))
                running.push_async_callback(process.stop)
            except TalonError as error:
                console.print(f"left out: {error}")
        for repeat, level, prompts in order:
            for one in drawn.sample(taking_part, len(taking_part)):
                about = f"{one.name}, {one.weights} by {one.activations}"
                console.print(f"repeat {repeat + 1}, {at_once(level)}: {about}", highlight=False)
                own = isinstance(one, Own)
                try:
                    seconds, tokens = await one.answer(prompts, max_tokens, level)
                except TalonError as error:
                    if own:
                        raise
                    taking_part.remove(one)  # it has been stopped
                    console.print(f"left out from here on: {error}")
                    continue
                yield Turn(one.name, one.weights, one.activations, level, repeat, seconds, tokens, talon=own)


def _ratios(found: Sequence[Turn], level: int) -> list[list[float]]:
    return [[*some.values()] for (_, setting, _), some in ratios(found).items() if setting == at_once(level)]


def weights_of(config: Config) -> str:
    """The type in memory of most of the model's weights."""
    file = open_gguf(Path(config.model))
    return name_of(dtype_of(config)) if file is None else file_type(file.path)


def _given(rivals: Rivals, config: Config, made: Path, most: int) -> Given:
    """What the engines are given. made: a folder for what is written for them; most: requests at once."""
    own = open_gguf(Path(config.model))
    files = {file_type(file): file for file in (*([] if own is None else [own.path]), *rivals.files)}
    if not files:
        raise ConfigError("--gguf: name a GGUF file of the model's weights, which other engines read")
    threads = config.verifier.threads or cores()
    return Given(partial(_directory, config.model, made), files, rivals.draft, threads, most)


def _directory(model: str, folder: Path) -> str:
    """The directory that other engines load, written into `folder` if the model's weights are in a GGUF file."""
    if open_gguf(Path(model)) is None:
        return model
    load_model(model, "bfloat16", torch.device("cpu")).save_pretrained(folder / "model")
    load_tokenizer(model).save_pretrained(folder / "model")
    return str(folder / "model")

"""Compares Talon's methods with other engines: the same prompts, greedy, the same cores, in turn.

Talon takes part with both kinds of activations, so that each engine finds one that multiplies as it does, or with the
one that the configuration names.

Prompts are token ids, so every engine reads the same text. A contestant answers all prompts of a turn, several at once;
tokens a second count the time from the first prompt to the last token, prompts included.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from transformers import AutoTokenizer

from engine.api import Engine
from engine.config import Config, load
from engine.core.errors import ConfigError, TalonError
from engine.core.params import SamplingParams
from engine.core.processor import cores
from engine.frontend.tasks import keep_under_way
from engine.model.loading import dtype_of, load_model, name_of, open_stored
from engine.weights.gguf.file import read_gguf
from engine.weights.gguf.source import open_gguf

from ..inputs.questions import check_prompts, mixed_questions
from ..measure.budget import Budget, is_narrow
from ..measure.contestants import WARM_UP_SAMPLING, warm_up_prompt
from ..measure.load import settings_of
from ..measure.memory import pss_mb
from ..measure.plan import MeasurementPlan
from ..report.engine_figures import ROWS, Turn, ratios
from ..report.load_figures import at_once
from .engines import Baseline, Given, Missing, baselines
from .rivals import Rivals
from .w8a8 import quantise

Prompts = Sequence[Sequence[int]]
Part = tuple[int, Prompts]
"""Requests at once, and the prompts that they ask."""
_LEAST, _ROUNDS = 20, 3  # prompts of a turn: at least so many, and so many for each request at once
_MOST = 20  # most repeats
_ACTIVATIONS = "bfloat16", "int8"


def turns(
    levels: Sequence[int],
    prompts: Prompts,
    repeats: int,
    budget: Budget,
    ratios: Callable[[int], Iterable[Sequence[float]]],
) -> Iterator[Sequence[Part]]:
    """Yield, for each repeat, what every contestant is asked. Parts take the next prompts, so that as few as possible
    repeat.

    With a bounded budget there are as many repeats as it allows, of the levels whose intervals are not narrow yet.
    ratios: at a level, of each contestant so far.
    """
    endless = itertools.cycle(prompts)
    for repeat in range(_MOST if budget.bounded else repeats):
        open_ = [level for level in levels if not repeat or not all(map(is_narrow, ratios(level)))]
        asked = open_ if budget.bounded else levels
        if repeat and (budget.spent or not asked):
            return
        yield [(level, [*itertools.islice(endless, prompts_of_turn(level))]) for level in asked]


def prompts_of_turn(level: int) -> int:
    """Return how many prompts a contestant answers at a level of requests at once."""
    return max(_LEAST, _ROUNDS * level)


def warn_of_repeats(prompts: int, levels: Sequence[int], console: Console) -> None:
    """Say so if a contestant is asked the same prompt twice before it starts afresh, which flatters one that remembers
    its answers. levels: of a repeat.
    """
    asked = sum(map(prompts_of_turn, levels))
    if prompts < asked:
        console.print(
            f"--limit: {prompts} prompts for {asked} answers of each contestant: repeats flatter engines that remember "
            f"answers; name {asked} prompts or more by --questions and --limit",
            highlight=False,
        )


class StartedEngine(Protocol):
    """An engine that has started."""

    async def answer(self, prompts: Prompts, max_tokens: int, at_once: int) -> tuple[float, list[int]]:
        """Answer all prompts; return the seconds that this took, and the tokens of each answer."""

    def memory_mb(self) -> float:
        """Return the proportional set size of all its processes."""

    async def stop(self) -> None: ...


class Entrant(Protocol):
    """One of Talon's methods, or another engine."""

    @property
    def name(self) -> str: ...

    @property
    def weights(self) -> str: ...

    @property
    def activations(self) -> str: ...

    @property
    def talon(self) -> bool: ...

    async def start(self) -> StartedEngine: ...


@dataclass(frozen=True)
class OwnEngine:
    """One of Talon's engines, at work."""

    engine: Engine

    async def answer(self, prompts: Prompts, max_tokens: int, at_once: int) -> tuple[float, list[int]]:
        tokens = [0] * len(prompts)

        async def one(place: int) -> None:
            result = await self.engine.generate([*prompts[place]], SamplingParams(max_tokens=max_tokens))
            tokens[place] = len(result.token_ids)

        started = time.perf_counter()
        await keep_under_way(at_once, range(len(prompts)), one)
        return time.perf_counter() - started, tokens

    def memory_mb(self) -> float:
        """Return that of the workers and of this process, where the front end is."""
        return pss_mb(os.getpid())

    async def stop(self) -> None:
        await self.engine.close()


@dataclass(frozen=True)
class Own:
    """One of Talon's methods, with a kind of activations."""

    name: str
    weights: str
    config: Config
    talon: bool = True

    @property
    def activations(self) -> str:
        return self.config.activations

    async def start(self) -> OwnEngine:
        return OwnEngine(await Engine.start(self.config))


async def run_baselines(plan: MeasurementPlan, levels: Sequence[int], rivals: Rivals, console: Console) -> list[Turn]:
    """Measure, and write rivals.jsonl as the turns end. levels: requests at once."""
    if plan.sampling.temperature != 0:
        raise ConfigError("--temperature: rivals are compared at 0 only; leave it out with --rivals")
    plan = plan.resolved()
    asked = [plan.encoded(suite, question) for suite, question in mixed_questions(plan.files, plan.limit)]
    found: list[Turn] = []
    prompts = [one.prompt for one in asked]
    warn_of_repeats(len(prompts), levels, console)
    order = turns(levels, prompts, plan.repeats, Budget(plan.minutes), lambda level: _ratios(found, level))
    ours = own_contestants(plan)
    first = await ours[0].start()
    try:
        check_prompts(asked, plan.sampling.max_tokens, first.engine.target.context)
    finally:
        await first.stop()
    with tempfile.TemporaryDirectory(prefix="talon-rivals-") as made:
        others = baselines(rivals.folder, _given(rivals, plan.config, Path(made), max(levels)))
        packages = dict.fromkeys(one.package for one in others if isinstance(one, Baseline))
        taken = compare(ours, others, order, warm_up_prompt(plan.config), plan.sampling.max_tokens, console)
        with plan.row_file(ROWS, [*packages]) as file:
            async with aclosing(taken):
                async for turn in taken:
                    found.append(turn)
                    file.write(turn)
    return found


def own_contestants(plan: MeasurementPlan) -> list[Own]:
    """Return Talon's methods, with both kinds of activations unless the configuration names one."""
    kinds = _ACTIVATIONS if plan.config.activations == "auto" else (plan.config.activations,)
    return [
        Own(name, weights_of(plan.config), load(settings_of(name, plan.config, plan.heads), {"activations": kind}))
        for kind in kinds
        for name in plan.contestants
    ]


async def compare(
    ours: Sequence[Own],
    others: Sequence[Baseline | Missing],
    order: Iterator[Sequence[Part]],
    warm_up: Sequence[int],
    max_tokens: int,
    console: Console,
) -> AsyncGenerator[Turn, None]:
    """Let all contestants take turns, each alone in memory. Those that cannot be started are named and left out; so are
    other engines that fail later, from then on. warm_up: a prompt that each answers first, as a first request compiles.
    """
    drawn = random.Random(0)
    here: list[Entrant] = [*ours, *(other for other in others if isinstance(other, Baseline))]
    for missing in (other for other in others if isinstance(other, Missing)):
        console.print(f"left out: {missing.name}: not installed: {missing.reason}")
    for repeat, parts in enumerate(order):
        for one in drawn.sample(here, len(here)):
            about = f"{one.name}, {one.weights} by {one.activations}"
            console.print(f"repeat {repeat + 1}: {about}", highlight=False)
            began = time.perf_counter()
            try:
                running = await one.start()
            except TalonError as error:
                here.remove(one)
                console.print(f"left out: {error}")
                continue
            start_s = time.perf_counter() - began
            try:
                await running.answer([warm_up], WARM_UP_SAMPLING.max_tokens, 1)
                for level, prompts in parts:
                    seconds, tokens = await running.answer(prompts, max_tokens, level)
                    yield Turn(
                        one.name,
                        one.weights,
                        one.activations,
                        level,
                        repeat,
                        seconds,
                        tokens,
                        one.talon,
                        start_s,
                        running.memory_mb(),
                    )
            except TalonError as error:
                if one.talon:
                    raise
                here.remove(one)
                console.print(f"left out from here on: {error}")
            finally:
                await running.stop()


def _ratios(found: Sequence[Turn], level: int) -> list[list[float]]:
    return [[*some.values()] for (_, setting, _), some in ratios(found).items() if setting == at_once(level)]


def weights_of(config: Config) -> str:
    """Return the type in memory of most of the model's weights."""
    stored = open_stored(Path(config.model))
    return name_of(dtype_of(config)) if stored is None else stored.kind


def _given(rivals: Rivals, config: Config, made: Path, most: int) -> Given:
    """Return what the engines are given. made: a folder for what is written for them; most: requests at once."""
    own = open_gguf(Path(config.model))
    others = (read_gguf(file, f"--gguf {file}") for file in rivals.files)
    files = {file.kind: file.path for file in (*([] if own is None else [own]), *others)}
    if not files:
        raise ConfigError("--gguf: name a GGUF file of the model's weights, which other engines read")
    threads = config.verifier.threads or cores()
    if open_stored(Path(config.model)) is None:
        return Given(lambda: config.model, "bfloat16", files, rivals.draft, threads, most)
    return Given(partial(_in_8_bits, config.model, made / "model"), "int8", files, rivals.draft, threads, most)


def _in_8_bits(model: str, folder: Path) -> str:
    """Return the directory that other engines load where Talon's weights are quantised, written into `folder`."""
    load_model(model, "bfloat16", torch.device("cpu")).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    quantise(folder)
    return str(folder)

"""Talon's methods against other engines: the same prompts, greedy, the same cores, in turn.

Prompts are token ids, so every engine reads the same text. A contestant answers all prompts of a turn, several at once;
tokens a second count the time from the first prompt to the last token, prompts included.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import torch
from rich.console import Console

from engine.api import Engine
from engine.core.errors import ConfigError, TalonError
from engine.core.params import SamplingParams
from engine.core.processor import cores
from engine.frontend.tasks import keep_under_way
from engine.model.loading import dtype_of, load_model, name_of, open_stored
from engine.weights.tokenizer import load_tokenizer

from ..inputs.questions import check_prompts, mixed_questions
from ..measure.budget import Budget, is_narrow
from ..measure.load import engines
from ..measure.plan import MeasurementPlan
from ..report.engine_figures import ROWS, Turn, ratios
from ..report.figures import PLAIN
from ..report.load_figures import at_once
from .engines import Baseline, Missing, Process, baselines

Prompts = Sequence[Sequence[int]]
_LEAST, _ROUNDS = 6, 3  # prompts of a turn: at least, and for each request at once
_MOST = 20  # repeats


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


async def answer(engine: Engine, prompts: Prompts, max_tokens: int, level: int) -> tuple[float, list[int]]:
    """As `Process.answer`, for one of Talon's engines."""
    tokens = [0] * len(prompts)

    async def one(place: int) -> None:
        result = await engine.generate([*prompts[place]], SamplingParams(max_tokens=max_tokens))
        tokens[place] = len(result.token_ids)

    started = time.perf_counter()
    await keep_under_way(level, range(len(prompts)), one)
    return time.perf_counter() - started, tokens


async def run_baselines(
    plan: MeasurementPlan, levels: Sequence[int], folder: Path, gguf: Path, console: Console
) -> list[Turn]:
    """Measure, and write rivals.jsonl as the turns end. levels: requests at once; folder: of the engines' virtual
    environments; gguf: the model's weights.
    """
    if plan.sampling.temperature != 0:
        raise ConfigError("--temperature: rivals are compared at 0 only; leave it out with --rivals")
    plan = plan.resolved()
    asked = [plan.encoded(suite, question) for suite, question in mixed_questions(plan.files, plan.limit)]
    threads, budget = plan.config.verifier.threads or cores(), Budget(plan.minutes)
    with tempfile.TemporaryDirectory(prefix="talon-rivals-") as made, plan.row_file(ROWS) as file:
        others = baselines(
            folder, _with_weights(plan.config.model, Path(made)), retyped(gguf, Path(made)), threads, max(levels)
        )
        async with engines(plan.contestants, plan.config, plan.heads, console) as ours:
            check_prompts(asked, plan.sampling.max_tokens, ours[PLAIN].target.context)
            found: list[Turn] = []
            order = turns(levels, [one.prompt for one in asked], plan.repeats, budget, lambda n: _ratios(found, n))
            weights = name_of(dtype_of(plan.config))
            async with aclosing(compare(ours, weights, others, order, plan.sampling.max_tokens, console)) as taken:
                async for turn in taken:
                    found.append(turn)
                    file.write(turn)
            return found


async def compare(
    ours: Mapping[str, Engine],
    weights: str,
    others: Sequence[Baseline | Missing],
    order: Iterator[tuple[int, int, Prompts]],
    max_tokens: int,
    console: Console,
) -> AsyncGenerator[Turn, None]:
    """Let all contestants take turns. Engines that cannot be started are named and left out; so are those that fail
    later, from then on. weights: the type that Talon's engines compute with.
    """
    drawn = random.Random(0)
    async with AsyncExitStack() as running:
        processes = {}
        for one in others:
            if isinstance(one, Missing):
                console.print(f"left out: {one.name}: not installed: {one.reason}")
                continue
            try:
                processes[one.name] = process = await Process.start(one)
                running.push_async_callback(process.stop)
            except TalonError as error:
                console.print(f"left out: {error}")
        for repeat, level, prompts in order:
            names = [*ours, *processes]
            for name in drawn.sample(names, len(names)):
                console.print(f"repeat {repeat + 1}, {at_once(level)}: {name}", highlight=False)
                try:
                    if name in ours:
                        seconds, tokens = await answer(ours[name], prompts, max_tokens, level)
                    else:
                        seconds, tokens = await processes[name].answer(prompts, max_tokens, level)
                except TalonError as error:
                    if name in ours:
                        raise
                    del processes[name]  # it has been stopped
                    console.print(f"left out from here on: {error}")
                    continue
                kind = weights if name in ours else processes[name].baseline.weights
                yield Turn(name, kind, level, repeat, seconds, tokens, talon=name in ours)


def _ratios(found: Sequence[Turn], level: int) -> list[list[float]]:
    return [[*some.values()] for (_, setting, _), some in ratios(found).items() if setting == at_once(level)]


def _with_weights(model: str, folder: Path) -> str:
    """The directory that other engines load, written into `folder` if Talon's weights are quantised."""
    if open_stored(Path(model)) is None:
        return model
    load_model(model, "bfloat16", torch.device("cpu")).save_pretrained(folder / "model")
    load_tokenizer(model).save_pretrained(folder / "model")
    return str(folder / "model")


def retyped(gguf_file: Path, folder: Path) -> dict[str, Path]:
    """The file as it is, under its own type, and its weights as bfloat16 and float16, written into `folder`."""
    from .gguf import file_type, retype

    kind = file_type(gguf_file)
    made = {other: folder / f"{gguf_file.stem}.{other}.gguf" for other in ("BF16", "F16") if other != kind}
    for other, goal in made.items():
        retype(gguf_file, goal, other)
    return made | {kind: gguf_file}

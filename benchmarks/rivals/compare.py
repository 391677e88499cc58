"""Talon's methods against other engines: the same prompts, greedy, the same cores, in turn.

Prompts are token ids, so every engine reads the same text. A contestant answers all prompts of a turn, several at once;
tokens a second count the time from the first prompt to the last token, prompts included.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from engine.api import Engine
from engine.config import Config, cores
from engine.core.errors import ConfigError, TalonError
from engine.core.params import SamplingParams
from engine.frontend.tasks import keep_under_way
from engine.model.loading import dtype_of, load_model, name_of
from engine.text.encode import encode_text
from engine.weights.gguf_source import open_gguf
from engine.weights.resolve import resolved
from engine.weights.tokenizer import load_tokenizer, tokenizer_of

from ..inputs.questions import AskedQuestion, check_prompts, mixed_questions
from ..measure.budget import Budget, is_narrow
from ..measure.load import engines
from ..report.about import write_about
from ..report.figures import BASELINE
from ..report.load_figures import at_once
from ..report.rival_figures import ROWS, Turn, cells
from ..report.row_file import RowFile
from .process import Missing, Process, Rival, rivals

Prompts = Sequence[Sequence[int]]
_LEAST, _ROUNDS = 6, 3  # prompts of a turn: at least, and for each request at once
_MOST = 20  # repeats


@dataclass(frozen=True)
class RivalPlan:
    """What is asked. levels: requests at once. repeats: of all levels; with a bounded budget, as many as it allows.
    weights: the type that Talon's engines compute with.
    """

    levels: Sequence[int]
    max_tokens: int
    prompts: Prompts
    repeats: int = 1
    budget: Budget = field(default_factory=lambda: Budget(None))
    weights: str = ""

    def turns(self, ratios: Callable[[int], Iterable[Sequence[float]]]) -> Iterator[tuple[int, int, Prompts]]:
        """(repeat, requests at once, prompts). Each turn takes the next prompts, so that as few as possible repeat.

        ratios: at a level, of each contestant so far; levels whose intervals are narrow are left out.
        """
        endless, budget = itertools.cycle(self.prompts), self.budget
        for repeat in range(_MOST if budget.bounded else self.repeats):
            open_ = [level for level in self.levels if not repeat or not all(map(is_narrow, ratios(level)))]
            for level in self.levels if not budget.bounded else open_:
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


@dataclass(frozen=True)
class Rivalry:
    """folder: of the rivals' environments. gguf: the model's weights."""

    folder: Path
    gguf: Path
    files: Sequence[Path]
    limit: int | None
    levels: Sequence[int]
    repeats: int
    sampling: SamplingParams
    minutes: float | None = None


async def run_rivals(
    config: Config, names: Sequence[str], what: Rivalry, out: Path, heads: Path | None, console: Console
) -> list[Turn]:
    """Measure, and write `out`/rivals.jsonl as the turns end."""
    if what.sampling.temperature != 0:
        raise ConfigError("--temperature: rivals are compared at 0 only; leave it out with --rivals")
    config = resolved(config)
    tokenizer = tokenizer_of(config)
    asked = [
        AskedQuestion(suite, q, encode_text(tokenizer, q.prompt))
        for suite, q in mixed_questions(what.files, what.limit)
    ]
    dtype = name_of(dtype_of(config))
    plan = RivalPlan(
        what.levels, what.sampling.max_tokens, [one.prompt for one in asked], what.repeats, Budget(what.minutes), dtype
    )
    threads = config.verifier.threads or cores()
    about = partial(write_about, out, config, [what.sampling], what.repeats)
    names = list(dict.fromkeys([BASELINE, *names]))
    with tempfile.TemporaryDirectory(prefix="talon-rivals-") as folder, RowFile(out / ROWS, about) as file:
        others = rivals(
            what.folder,
            _with_weights(config.model, Path(folder)),
            retyped(what.gguf, Path(folder)),
            threads,
            max(what.levels),
        )
        async with engines(names, config, heads, console) as ours:
            check_prompts(asked, what.sampling.max_tokens, ours[BASELINE].target.context)
            return await compare(ours, others, plan, file, console)


async def compare(
    ours: Mapping[str, Engine], others: Sequence[Rival | Missing], plan: RivalPlan, results: RowFile, console: Console
) -> list[Turn]:
    """Let all contestants take turns. Rivals that cannot be started are named and left out; so are those that fail
    later, from then on.
    """
    turns: list[Turn] = []
    order = random.Random(0)
    async with AsyncExitStack() as running:
        processes = {}
        for rival in others:
            if isinstance(rival, Missing):
                console.print(f"left out: {rival.name}: not installed: {rival.reason}")
                continue
            try:
                processes[rival.name] = process = await Process.start(rival)
                running.push_async_callback(process.stop)
            except TalonError as error:
                console.print(f"left out: {error}")
        for repeat, level, prompts in plan.turns(lambda level: _ratios(turns, level)):
            names = [*ours, *processes]
            for name in order.sample(names, len(names)):
                console.print(f"repeat {repeat + 1}, {at_once(level)}: {name}", highlight=False)
                if name in ours:
                    weights = plan.weights
                    seconds, tokens = await answer(ours[name], prompts, plan.max_tokens, level)
                else:
                    weights = processes[name].rival.weights
                    try:
                        seconds, tokens = await processes[name].answer(prompts, plan.max_tokens, level)
                    except TalonError as error:
                        del processes[name]  # it has been stopped
                        console.print(f"left out from here on: {error}")
                        continue
                turns.append(Turn(name, weights, level, repeat, seconds, tokens, talon=name in ours))
                results.write(turns[-1])
    return turns


def _ratios(turns: Sequence[Turn], level: int) -> list[list[float]]:
    return [[*some.values()] for (_, setting, _), some in cells(turns).items() if setting == at_once(level)]


def _with_weights(model: str, folder: Path) -> str:
    """The directory that other engines load, written into `folder` if a GGUF file has its weights."""
    if open_gguf(Path(model)) is None:
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

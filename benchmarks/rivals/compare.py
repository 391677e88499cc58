"""Talon's methods beside other engines: the same prompts, greedy, the same cores, in turns.

Prompts are token ids, so every engine reads the same text. A contestant answers all prompts of a turn, so many at once;
tokens a second count the time from the first prompt to the last token, prompts included.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from engine.api import Engine
from engine.config import Config, cores
from engine.errors import ConfigError, TalonError
from engine.loading import find_device, find_dtype, load_config, name_of
from engine.model.resolve import resolved
from engine.sampling import SamplingParams
from engine.tasks import keep_under_way
from engine.text import encode_text, load_tokenizer

from ..about import write_about
from ..figures import BASELINE
from ..load import engines
from ..questions import mixed_questions
from .process import Missing, Process, Rival, rivals

Prompts = Sequence[Sequence[int]]
_LEAST, _ROUNDS = 6, 3  # prompts of a turn: at least, and for each request at once


class Turn(msgspec.Struct, frozen=True):
    """A line of rivals.jsonl. tokens: of each answer; seconds: for all of them."""

    contestant: str
    weights: str
    at_once: int
    repeat: int
    seconds: float
    tokens: list[int]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(self.tokens) / self.seconds


@dataclass(frozen=True)
class Plan:
    """levels: requests at once. prompts: one list for each turn of a contestant, levels within repeats. weights: what
    Talon's engines compute with.
    """

    levels: Sequence[int]
    max_tokens: int
    prompts: Sequence[Prompts]
    weights: str = ""


async def answer(engine: Engine, prompts: Prompts, max_tokens: int, at_once: int) -> tuple[float, list[int]]:
    """As `Process.answer`, of one of Talon's engines."""
    tokens = [0] * len(prompts)

    async def one(place: int) -> None:
        result = await engine.generate([*prompts[place]], SamplingParams(max_tokens=max_tokens))
        tokens[place] = len(result.token_ids)

    started = time.perf_counter()
    await keep_under_way(at_once, range(len(prompts)), one)
    return time.perf_counter() - started, tokens


async def run_rivals(
    config: Config,
    names: Sequence[str],
    files: Sequence[Path],
    limit: int | None,
    levels: Sequence[int],
    repeats: int,
    sampling: SamplingParams,
    folder: Path,
    gguf: Path,
    out: Path,
    console: Console,
) -> list[Turn]:
    """Measure, and write `out`/rivals.jsonl as the turns end. folder: of the rivals' environments."""
    if sampling.temperature != 0:
        raise ConfigError("--temperature: rivals are compared at 0 only; leave it out with --rivals")
    config = resolved(config)
    tokenizer = load_tokenizer(config.model)
    questions = mixed_questions(files, limit)
    prompts = itertools.cycle([encode_text(tokenizer, question.prompt) for _, question in questions])
    counts = [max(_LEAST, _ROUNDS * level) for _ in range(repeats) for level in levels]
    dtype = name_of(find_dtype(config.dtype, load_config(config.model), find_device(config.device)))
    plan = Plan(levels, sampling.max_tokens, [[*itertools.islice(prompts, count)] for count in counts], dtype)
    threads = config.verifier.threads or cores()
    others = rivals(folder, config.model, retyped(gguf, out), threads)
    write_about(out, config, [sampling], repeats)
    names = list(dict.fromkeys([BASELINE, *names]))
    with (out / "rivals.jsonl").open("w", encoding="utf8") as results:
        async with engines(names, config, None, console) as ours:
            return await compare(ours, others, plan, results, console)


async def compare(
    ours: dict[str, Engine], others: Sequence[Rival | Missing], plan: Plan, results: TextIO, console: Console
) -> list[Turn]:
    """Let all contestants take turns. Rivals that cannot be started are named and left out."""
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
        names = [*ours, *processes]
        for number, prompts in enumerate(plan.prompts):
            repeat, level = divmod(number, len(plan.levels))
            at_once = plan.levels[level]
            for name in order.sample(names, len(names)):
                if name in processes and processes[name].rival.most < at_once:
                    continue
                console.print(f"repeat {repeat + 1}, {at_once} at once: {name}", highlight=False)
                if name in ours:
                    weights = plan.weights
                    seconds, tokens = await answer(ours[name], prompts, plan.max_tokens, at_once)
                else:
                    weights = processes[name].rival.weights
                    seconds, tokens = await processes[name].answer(prompts, plan.max_tokens, at_once)
                turns.append(Turn(name, weights, at_once, repeat, seconds, tokens))
                results.write(msgspec.json.encode(turns[-1]).decode() + "\n")
                results.flush()
    return turns


def rates(turns: Sequence[Turn], name: str, at_once: int) -> dict[int, float]:
    """Tokens a second by repeat."""
    return {turn.repeat: turn.rate for turn in turns if (turn.contestant, turn.at_once) == (name, at_once)}


def table(turns: Sequence[Turn]) -> Table:
    """A row for each contestant: median tokens a second, and the median of its ratios to Talon's plain decoding."""
    levels = sorted({turn.at_once for turn in turns})
    shown = Table(title="tokens/s, and how many times Talon's plain decoding", title_justify="left")
    shown.add_column("engine")
    shown.add_column("weights")
    for level in levels:
        shown.add_column(f"{level} at once", justify="right")
    weights = {turn.contestant: turn.weights for turn in turns}
    best = {name: max(rates(turns, name, levels[-1]).values(), default=0.0) for name in weights}
    for name in sorted(weights, key=lambda name: -best[name]):
        cells = []
        for level in levels:
            mine, plain = rates(turns, name, level), rates(turns, BASELINE, level)
            ratios = [mine[repeat] / plain[repeat] for repeat in mine.keys() & plain.keys()]
            cells.append(f"{median(mine.values()):.0f} ({median(ratios):.2f}x)" if ratios else "-")
        shown.add_row(name, weights[name], *cells)
    return shown


def retyped(gguf_file: Path, folder: Path) -> dict[str, Path]:
    """The file's weights as bfloat16 and float16, made once in `folder`."""
    from .gguf import retype

    goals = {kind: folder / f"{gguf_file.stem}.{kind}.gguf" for kind in ("BF16", "F16")}
    for kind, goal in goals.items():
        if not goal.exists():
            retype(gguf_file, goal, kind)
    return goals

"""`talon bench --concurrency`: many requests at once, methods in turn, and every text compared with that of the same
prompt alone.

Engines are started once per repeat and see no question twice in it, as long as there are enough: a drafter that
remembers answers would draft from them, and a prompt in the prefix cache would not be read again.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from engine.api import Engine
from engine.config import Config, load
from engine.core.errors import ConfigError
from engine.core.methods import METHODS
from engine.core.params import SamplingParams
from engine.frontend.tasks import keep_under_way

from ..inputs.questions import AskedQuestion, check_prompts, mixed_questions
from ..report.figures import PLAIN, TRANSFORMERS
from ..report.load_figures import ROWS, LoadRow, at_once, ratios, requests_per_second
from ..report.out_folder import RowFile
from ..report.progress import progress_bar
from .arrivals import arrival_times, ask_at
from .budget import Budget, is_narrow
from .contestants import WARM_UP_PROMPT, WARM_UP_SAMPLING, check_name, keys_of, start_each
from .plan import MeasurementPlan

CAPACITY_AT = 16
"""Arrivals are shares of the requests a second that plain decoding answers with this many at once."""
_MOST = 20  # most repeats
_ROUNDS = 4  # requests at a level, for each place: with fewer, the prompts that start together weigh too much

Texts = Mapping[tuple[int, ...], list[int]]


@dataclass(frozen=True)
class Part:
    """One measurement of a repeat: `level` requests at once, or arrivals at a share of plain decoding's capacity."""

    level: int | None = None
    share: float | None = None

    def __str__(self) -> str:
        return f"{self.level} at once" if self.level is not None else f"arrivals at {self.share:g}"


def settings_of(name: str, config: Config, heads: Path | None = None) -> Config:
    """Return the configuration of a method as served, with its trees cut to the round's budget; a contestant's name
    stands for its own keys.
    """
    if name in TRANSFORMERS:
        raise ConfigError(f"method={name!r}: answers one request at a time; leave it out with --concurrency")
    if name not in METHODS:
        check_name(name)
    weights = {} if heads is None else {"drafter.path": str(heads / "{method}"), "drafter.tuned": None}
    return load(config, keys_of(name, as_served=True) | weights | {"queue.full": "wait"})


async def run_load(
    plan: MeasurementPlan, levels: Sequence[int], shares: Sequence[float], console: Console
) -> list[LoadRow]:
    """Measure, and write load.jsonl as the rows come in.

    levels: requests at once; shares: arrivals as shares of plain decoding's capacity. With minutes, as many repeats as
    these allow, of the levels whose intervals are not narrow yet.
    """
    questions_of = mixed_questions(plan.files, plan.limit)
    for name in plan.contestants:
        settings_of(name, plan.config, plan.heads)
    plan = plan.resolved()
    mixed = [plan.encoded(suite, question) for suite, question in questions_of]
    parts = _parts(levels, shares, len(plan.files))
    if (wanted := sum(parts.values())) > len(mixed):
        console.print(
            f"{len(mixed)} questions for {wanted} requests: some are asked again, which flatters drafters that "
            "remember and shortens first tokens; give more files, or raise --limit"
        )
    questions = dict(zip(parts, _slices(mixed, list(parts.values())), strict=True))
    names, rows = plan.contestants, list[LoadRow]()
    with progress_bar(console) as progress, plan.row_file(ROWS) as results:
        different = {tuple(one.prompt): one for part in questions.values() for one in part}
        budget = Budget(plan.minutes)
        repeated = 0 if budget.bounded else plan.repeats  # the number that the minutes allow is not known
        total = len(different) + len(names) * repeated * wanted
        bench = _Bench(plan.sampling, results, rows, progress, total)
        async with engines([PLAIN], plan.config, None, console) as alone:
            check_prompts(different.values(), plan.sampling.max_tokens, alone[PLAIN].target.context)
            bench.texts = {prompt: await bench.text(alone[PLAIN], one) for prompt, one in different.items()}
        order = random.Random(plan.sampling.seed)
        for repeat in range(_MOST if budget.bounded else plan.repeats):
            if repeat and (
                budget.spent or not (questions := {p: q for p, q in questions.items() if not _known(p, rows)})
            ):
                break
            if budget.bounded:
                bench.more(len(names) * sum(map(len, questions.values())))
            async with engines(names, plan.config, plan.heads, console) as started:
                for part, asked in questions.items():
                    for name in order.sample(list(started), len(started)):
                        bench.begin(name, part, repeat)
                        if part.level is not None:
                            await bench.at_once(started[name], asked, part.level)
                        elif part.share is not None:
                            await bench.arriving(started[name], asked, arrivals(rows, repeat, part.share, len(asked)))
    return rows


class _Bench:
    """One measurement after the other. texts: the answer to each prompt alone."""

    def __init__(
        self, sampling: SamplingParams, results: RowFile, rows: list[LoadRow], progress: Progress, total: int
    ) -> None:
        self.sampling, self.results, self.rows, self.progress = sampling, results, rows, progress
        self.texts: Texts = {}
        self.task, self.total = progress.add_task("alone", total=total), total
        self.name, self.repeat, self.started_s = "", 0, 0.0
        self.part = Part()

    def more(self, requests: int) -> None:
        self.total += requests
        self.progress.update(self.task, total=self.total)

    def begin(self, name: str, part: Part, repeat: int) -> None:
        self.name, self.part, self.repeat, self.started_s = name, part, repeat, time.perf_counter()
        self.progress.update(self.task, description=f"{name}, {part}")

    async def text(self, engine: Engine, one: AskedQuestion) -> list[int]:
        answer = (await engine.generate(one.prompt, self.sampling)).token_ids
        self.progress.advance(self.task)
        return answer

    async def at_once(self, engine: Engine, asked: Sequence[AskedQuestion], places: int) -> None:
        """Keep `places` requests under way until there are no more to start."""
        await keep_under_way(places, asked, lambda one: self._ask(engine, one))

    async def arriving(self, engine: Engine, asked: Sequence[AskedQuestion], at_s: Sequence[float]) -> None:
        """Start each request at its time, whatever is under way."""
        await ask_at(at_s, asked, lambda one: self._ask(engine, one), self.started_s)

    async def _ask(self, engine: Engine, one: AskedQuestion) -> None:
        asked_s = self._now_s()
        emitted: list[tuple[float, int]] = []
        async with engine.stream(one.prompt, self.sampling) as stream:
            async for piece in stream:
                emitted.append((self._now_s(), len(piece.token_ids)))
        assert stream.result is not None
        row = LoadRow(
            suite=one.suite,
            question_id=one.question.question_id,
            method=self.name,
            concurrency=self.part.level,
            arrivals=self.part.share,
            repeat=self.repeat,
            asked_s=asked_s,
            emitted=emitted,
            output_equal=stream.result.token_ids == self.texts[tuple(one.prompt)],
            exact=stream.result.metrics.exact,
            busy=stream.result.metrics.verifier_busy,
        )
        self.rows.append(row)
        self.results.write(row)
        self.progress.advance(self.task)

    def _now_s(self) -> float:
        return time.perf_counter() - self.started_s


@asynccontextmanager
async def engines(
    names: Sequence[str], config: Config, heads: Path | None, console: Console
) -> AsyncIterator[dict[str, Engine]]:
    """Start an engine for each method that can be started here, warmed up; for the others, a line says
    what they lack.
    """
    started = await start_each(
        names,
        lambda name: Engine.start(settings_of(name, config, heads)),
        lambda engine: engine.generate(WARM_UP_PROMPT, WARM_UP_SAMPLING),
        console,
    )
    try:
        yield started
    finally:
        for engine in started.values():
            await engine.close()


def arrivals(rows: Sequence[LoadRow], repeat: int, share: float, count: int) -> list[float]:
    """Return when `count` requests arrive, in seconds: a Poisson process at that share of plain decoding's capacity.

    The times are the same for every method of a repeat.
    """
    rate = share * requests_per_second(
        [r for r in rows if (r.method, r.concurrency, r.repeat) == (PLAIN, CAPACITY_AT, repeat)]
    )
    return arrival_times(rate, count, f"{repeat} {share}")


def _parts(levels: Sequence[int], shares: Sequence[float], suites: int) -> dict[Part, int]:
    """Return what is measured in a repeat, levels before shares, and with how many requests."""
    needed = [*levels, *([CAPACITY_AT] if shares and CAPACITY_AT not in levels else [])]
    counts = {Part(level=level): max(_ROUNDS * level, suites) for level in needed}
    return counts | {Part(share=share): _ROUNDS * CAPACITY_AT for share in shares}


def _known(part: Part, rows: Sequence[LoadRow]) -> bool:
    """Return whether it need not be measured again; arrivals always need plain decoding's capacity of the
    same repeat.
    """
    if part.level is None or any(row.arrivals is not None for row in rows):
        return False
    found = [some for (_, setting, _), some in ratios(rows).items() if setting == at_once(part.level)]
    return all(is_narrow([*some.values()]) for some in found)


def _slices(mixed: Sequence[AskedQuestion], counts: Sequence[int]) -> Iterator[list[AskedQuestion]]:
    """Yield as many questions as each count says, none repeated before all were taken."""
    endless = itertools.cycle(mixed)
    for count in counts:
        yield list(itertools.islice(endless, count))

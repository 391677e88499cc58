"""Compares the new head with what drafts without it: each prompt is answered by all in turn, since machines drift."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

from engine.config import Config, load
from engine.core.errors import ModelError
from engine.core.params import SamplingParams
from engine.files.whole_file import write_whole
from engine.weights.installed_head import METHOD
from engine.weights.resolve import resolve, resolved, with_own

from ..inputs.questions import Question
from ..measure.bench import compared, row_of
from ..measure.budget import Budget
from ..measure.contestants import WARM_UP_SAMPLING, TalonContestant, start_each, warm_up_prompt
from ..measure.ties import Referee
from ..report.figures import PLAIN, Row, summaries
from ..report.progress import progress_bar
from ..report.ratios import interval
from .prompts import TuningPrompt

SUFFIX, NEW, OLD = "suffix", "hybrid, new head", "hybrid, old head"
LEAST_MEASURED = 6  # prompts, whatever the time


def contestants(config: Config, head: Path) -> dict[str, Config]:
    """Return the configurations to compare: plain, retrieval alone, with the new head, and with one that the engine
    finds so far, if there is any. All without a cache, whose answers would be found again.
    """
    config = load(config, {"verifier.cache": None})
    new = {"method": "hybrid", "drafter.head": METHOD, "drafter.path": str(head), "drafter.tuned": None}
    found = {PLAIN: load(config, {"method": "none"}), SUFFIX: load(config, {"method": "suffix"})}
    found[NEW] = load(config, new)
    old = with_own(load(config, {"method": "hybrid", "model": resolve(config.model)}))
    if old.drafter.head == "mtp" or old.drafter.weights(old.drafter.head) is not None:
        found[OLD] = old
    return found


def in_use(configs: Mapping[str, Config]) -> str:
    """Return the head that the engine finds so far, "" if there is none: a later one lies in another folder."""
    if OLD not in configs:
        return ""
    drafter = configs[OLD].drafter
    weights = drafter.weights(drafter.head)
    return drafter.head if weights is None else str(Path(weights).resolve())


async def measure(
    configs: Mapping[str, Config],
    prompts: Sequence[TuningPrompt],
    sampling: SamplingParams,
    minutes: float,
    file: Path,
    console: Console,
) -> list[Row]:
    """Let all answer the prompts, and return a row for each answer; what all have answered in the file is not asked
    again. minutes: of answers, those in the file included.
    """
    rows = _rows_in(file)
    budget = Budget(minutes - sum(row.seconds for row in rows) / 60)
    config = resolved(configs[PLAIN])
    warm_up, referee, order = warm_up_prompt(config), Referee(config), random.Random(sampling.seed + len(rows))

    async def start(name: str) -> TalonContestant:
        return await TalonContestant.start(configs[name])

    started = await start_each([*configs], start, lambda one: one.answer(warm_up, WARM_UP_SAMPLING), console)
    try:
        if NEW not in started:
            raise ModelError(f"head={configs[NEW].drafter.path}: cannot be started, as told above: add --again")
        rows = _answered_by_all(rows, started)
        asked = {row.question_id for row in rows}
        with progress_bar(console) as progress:
            task = progress.add_task("measuring", total=len(prompts), completed=len(asked))
            for prompt in (one for one in prompts if one.digest not in asked):
                if budget.spent and len(asked) >= LEAST_MEASURED:
                    break
                runs = {}
                for name in order.sample([*started], len(started)):
                    runs[name] = await started[name].answer(prompt.tokens, sampling)
                question, plain = Question(prompt.digest, "", [prompt.name]), runs[PLAIN].token_ids
                for name, run in runs.items():
                    row = row_of("held out", question, name, sampling, 0, run)
                    rows.append(compared(row, run.token_ids, plain, prompt.tokens, sampling, referee))
                write_whole(file, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
                asked.add(prompt.digest)
                progress.advance(task)
    finally:
        for one in started.values():
            await one.close()
    return rows


def _rows_in(file: Path) -> list[Row]:
    """Return what was measured before a kill."""
    return [msgspec.json.decode(line, type=Row) for line in file.read_bytes().splitlines()] if file.is_file() else []


def _answered_by_all(rows: Sequence[Row], names: Collection[str]) -> list[Row]:
    """Return the rows of these contestants and of the prompts that each of them has answered: since a kill, others may
    have been installed, and one may lack memory.
    """
    asked = (frozenset(row.question_id for row in rows if row.method == name) for name in names)
    shared = frozenset.intersection(*asked)
    return [row for row in rows if row.method in names and row.question_id in shared]


@dataclass(frozen=True)
class Gain:
    """How fast answers are with the new head. other: the fastest without it; ratio: the median over prompts of its
    tokens/s to the other's, low and high the ends of its 95% interval; plain: the same to plain decoding's; prompts:
    how many.
    """

    other: str
    ratio: float
    low: float
    high: float
    plain: float
    prompts: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Gain:
        speeds = {one.method: one.speed_up for one in summaries(rows)}
        other = max((name for name in speeds if name != NEW), key=lambda name: speeds[name])
        ratios = _ratios(rows, other)
        return cls(other, median(ratios), *interval(ratios), median(_ratios(rows, PLAIN)), len(ratios))

    @property
    def pays(self) -> bool:
        """Whether the head surely makes answers faster."""
        return self.low > 1

    def __str__(self) -> str:
        other = "plain decoding" if self.other == PLAIN else self.other
        told = f"{self.ratio:.2f}x as fast as {other} (95%: {self.low:.2f} to {self.high:.2f})"
        beside = "" if self.other == PLAIN else f", {self.plain:.2f}x plain decoding"
        return f"{told}{beside}, {self.prompts} prompts"


def _ratios(rows: Sequence[Row], other: str) -> list[float]:
    """Return for each prompt the tokens/s with the new head over those of another."""
    theirs = {row.prompt: row.tokens_per_second for row in rows if row.method == other}
    return [row.tokens_per_second / theirs[row.prompt] for row in rows if row.method == NEW]

"""The answers that a tuning learns from: one to each prompt, then others that are drawn, while there is time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from drafters.training.progress import COLUMNS, Stage
from drafters.training.recipe import Recipe
from engine.api import Engine
from engine.cli.answer_file import answer_all
from engine.config import Config, load
from engine.core.params import SamplingParams
from engine.files.answer_rows import open_answers
from engine.files.prompt_file import PromptRow

from .journal import TuningJournal, key_of
from .prompts import TuningPrompt

FIRST, FURTHER = 0.45, 0.15
"""Shares of a tuning's time until which first answers are begun, and further ones: to compute an answer's hidden states
takes as long again as to give it, and a head also learns when it is trained over fewer answers more often.
"""
LEAST = 20  # answers of which a head learns anything at all
_ANSWERING: dict[str, Any] = {"method": "suffix", "verifier.cache": None}


@dataclass(frozen=True)
class Round:
    """An answer to each prompt. file: keeps them; share: of the time until which they are begun; least: so many are
    answered in any case.
    """

    file: Path
    sampling: SamplingParams
    share: float
    least: int


class Answering:
    """The answers to prompts, in files of `place`. identity: of the model's weights; resolved: the configuration as the
    engine finds it, since answers differ with the arithmetic.
    """

    def __init__(self, place: Path, identity: str, config: Config, resolved: Config, recipe: Recipe):
        self.identity, self.config = identity, config
        arithmetic = (
            resolved.activations, resolved.dtype, resolved.device, resolved.weights, resolved.verifier.kv_type,
        )  # fmt: skip
        self.rounds: list[Round] = []
        for number in range(recipe.answers_each):
            temperature = recipe.further_temperature if number else recipe.temperature
            sampling = SamplingParams(
                temperature=temperature, seed=recipe.seed + number, max_tokens=recipe.answer_tokens
            )
            file = place / f"answers-{key_of(sampling, arithmetic)}.jsonl"
            self.rounds.append(Round(file, sampling, FURTHER if number else FIRST, 0 if number else LEAST))

    async def answer(
        self, prompts: Sequence[TuningPrompt], hours: float, at_once: int, journal: TuningJournal, console: Console
    ) -> None:
        """Answer the prompts that are not answered yet, in the rounds' shares of the hours."""
        asked = [self._unanswered(one, prompts) for one in self.rounds]
        if not any(asked):
            return
        async with AsyncExitStack() as stack:
            progress = stack.enter_context(Progress(*COLUMNS, console=console))
            stack.enter_context(journal.answering())
            engine: Engine | None = None
            for one, wanted in zip(self.rounds, asked, strict=True):
                journal.tick()
                ready, left_s = len(prompts) - len(wanted), 3600 * hours * one.share - journal.done.answering_s
                if not wanted or (left_s <= 0 and ready >= one.least):
                    continue
                if engine is None:
                    engine = await stack.enter_async_context(await Engine.start(load(self.config, _ANSWERING)))
                in_time = _in_time(wanted, ready, one.least, time.monotonic() + left_s)
                report = _reporting(journal, Stage(progress, "answering", len(prompts), ready), ready)
                await answer_all(engine, in_time, one.file, self.identity, one.sampling, at_once, report)

    def _unanswered(self, one: Round, prompts: Sequence[TuningPrompt]) -> list[TuningPrompt]:
        answers = open_answers(one.file, self.identity, one.sampling)
        return [prompt for prompt in prompts if prompt.asked not in answers]

    def rows(self, prompts: Sequence[TuningPrompt]) -> list[list[PromptRow]]:
        """Return for each round the prompts with their answers, as training reads them."""
        found = [open_answers(one.file, self.identity, one.sampling) for one in self.rounds]
        return [
            [PromptRow(one.name, one.tokens, answers[one.asked]) for one in prompts if one.asked in answers]
            for answers in found
        ]


def _reporting(journal: TuningJournal, stage: Stage, ready: int) -> Callable[[int], None]:
    def report(ended: int) -> None:
        journal.tick()
        stage(ready + ended)

    return report


def _in_time(prompts: Sequence[TuningPrompt], ready: int, least: int, ends: float) -> Iterator[tuple[str, list[int]]]:
    """Yield prompts to answer until the time ends; `least` in any case. ready: how many are answered; ends: of the
    monotonic clock.
    """
    for number, one in enumerate(prompts, start=ready):
        if number >= least and time.monotonic() >= ends:
            return
        yield one.asked, one.tokens

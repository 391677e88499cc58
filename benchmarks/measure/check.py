"""`talon check` shows whether every method, mode, transport and number of threads gives the text of plain decoding, on
your model and your prompts.

Plain decoding answers one request at a time; the others run as many at once as asked for. Every engine answers
everything at every temperature and is closed before the next one starts: memory stays flat.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from drafters import registry
from engine.api import Engine
from engine.config import Config, load
from engine.core.errors import ConfigError, ModelError
from engine.core.params import SamplingParams
from engine.files.json_lines import BadLine, json_lines
from engine.frontend.tasks import keep_under_way
from engine.text.encode import encode_text
from engine.weights.resolve import resolved
from engine.weights.tokenizer import tokenizer_of

from ..inputs.questions import AskedQuestion, Question, check_prompts, read_questions
from ..report.figures import PLAIN, Difference
from ..report.progress import progress_bar
from .equality import TRANSFORMERS, Comparison, Different, Setting
from .load import settings_of
from .ties import TIE, Referee, most_turned, score_gap


@dataclass(frozen=True)
class Grid:
    """What is compared. Every question is answered under all settings of a method or, with `spread`, under one of them,
    the next question under the next. at_once: requests under way in an engine.
    """

    methods: Sequence[str]
    modes: Sequence[str]
    transports: Sequence[str]
    threads: Sequence[int | None]
    temperatures: Sequence[float]
    at_once: int = 1
    spread: bool = False

    def settings(self) -> list[Setting]:
        """Return all settings. Plain decoding has no drafter to run in turns or ahead, so it appears in
        one mode only.
        """
        some = itertools.product(self.methods, self.modes, self.transports, self.threads)
        return [one for one in itertools.starmap(Setting, some) if one.method != PLAIN or one.mode == self.modes[0]]

    def questions_of(self, setting: Setting, count: int) -> range:
        """Return which of `count` questions are answered under a setting."""
        if not self.spread:
            return range(count)
        settings = [one for one in self.settings() if one.method == setting.method]
        if count < len(settings):
            raise ConfigError(
                f"--spread: {count} questions for {len(settings)} settings of a method; give more questions"
            )
        return range(settings.index(setting), count, len(settings))


Texts = dict[int, list[int]]
"""By the question's index, in order."""


class CheckLog:
    """Finished comparisons, saved to a file as they come; those in the file are not repeated."""

    def __init__(self, path: Path | None, about: dict[str, Any]):
        """Open the log. about: what is compared. ConfigError if the file is about something else."""
        self.path, self.done = path, list[Comparison]()
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                if not file.tell():
                    file.write(msgspec.json.encode(about) + b"\n")
                file.seek(0)
                if msgspec.json.decode(file.readline()) != about:
                    raise BadLine(1, "is of another model, other questions, another sampling or spread")
                self.done = [row for _, row in json_lines(file, Comparison)]
        except (BadLine, msgspec.DecodeError) as error:
            raise ConfigError(f"log={path}: cannot be gone on with ({error}); name another file") from None
        except OSError as error:
            raise ConfigError(f"log={path}: cannot be written: {error.strerror or error}; name another file") from None

    def has(self, reference: str, setting: Setting | None = None) -> bool:
        return any(one.reference == reference and setting in (None, one.setting) for one in self.done)

    def add(self, comparisons: Sequence[Comparison]) -> None:
        self.done += comparisons
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(one) + b"\n" for one in comparisons))


class Check:
    """One check in progress. The float32 model is loaded only when there is a gap to judge."""

    def __init__(
        self, config: Config, tokenizer: Any, asked: Sequence[AskedQuestion], sampling: SamplingParams, grid: Grid
    ):
        self.config, self.tokenizer, self.asked, self.grid = config, tokenizer, asked, grid
        self.sampling = sampling
        self.samplings = {t: msgspec.structs.replace(sampling, temperature=t) for t in grid.temperatures}
        self.referee = Referee(config)
        self.plain: dict[float, Texts] = {}
        self.exact = True

    async def read_plain(self, progress: Progress) -> None:
        """Read plain decoding's texts, one request at a time."""
        config = settings_of(PLAIN, self.config)
        self.plain = await self._texts(config, range(len(self.asked)), 1, "plain decoding", progress)

    async def compare(self, setting: Setting, progress: Progress) -> list[Comparison]:
        """Compare a setting's texts with plain decoding's, for each temperature."""
        keys = {"mode": setting.mode, "transport": setting.transport, "verifier.threads": setting.threads}
        config = load(settings_of(setting.method, self.config), keys)
        chosen = self.grid.questions_of(setting, len(self.asked))
        texts = await self._texts(config, chosen, self.grid.at_once, str(setting), progress)
        tie = 0.0 if self.exact else TIE[self.referee.dtype]
        return [self._compared(Comparison(setting, t, PLAIN, tie), texts[t], self.plain[t]) for t in texts]

    async def compare_with_transformers(self, progress: Progress) -> Comparison:
        """Compare plain decoding's greedy texts with those of transformers' generate in float32. Ties are gaps that
        transformers itself, in the target's type, reverses along those texts.
        """
        from .transformers_baseline import TransformersContestant

        task = progress.add_task(TRANSFORMERS, total=len(self.asked))
        stock = await TransformersContestant.start(load(self.config, {"dtype": "float32"}))
        texts: Texts = {}
        try:
            for index, one in enumerate(self.asked):
                texts[index] = (await stock.answer(one.prompt, self.samplings[0.0])).token_ids
                progress.advance(task)
            tie = TIE[self.referee.dtype]
            if self.referee.dtype != "float32":
                tie = max(tie, await self._most_turned(stock.model, texts, progress))
        finally:
            await stock.close()
        setting = Setting(PLAIN, self.grid.modes[0], self.config.transport, self.config.verifier.threads)
        return self._compared(Comparison(setting, 0.0, TRANSFORMERS, tie), self.plain[0.0], texts)

    async def _most_turned(self, exact: Any, texts: Texts, progress: Progress) -> float:
        from .transformers_baseline import TransformersContestant

        rounded = await TransformersContestant.start(self.config)
        try:
            task = progress.add_task("what rounding turns", total=len(texts))
            turned = 0.0
            for index, text in texts.items():
                turned = max(turned, most_turned(exact, rounded.model, self.asked[index].prompt, text))
                progress.advance(task)
            return turned
        finally:
            await rounded.close()

    async def _texts(
        self, config: Config, chosen: range, at_once: int, name: str, progress: Progress
    ) -> dict[float, Texts]:
        task = progress.add_task(name, total=len(chosen) * len(self.samplings))
        texts: dict[float, Texts] = {t: {index: [] for index in chosen} for t in self.samplings}
        async with await Engine.start(config) as engine:
            check_prompts(self.asked, self.sampling.max_tokens, engine.target.context)

            async def answer(one: tuple[float, int]) -> None:
                temperature, index = one
                result = await engine.generate(self.asked[index].prompt, self.samplings[temperature])
                texts[temperature][index] = result.token_ids
                self.exact &= result.metrics.exact
                progress.advance(task)

            await keep_under_way(at_once, itertools.product(texts, chosen), answer)
        return texts

    def _compared(self, blank: Comparison, texts: Texts, wanted: Texts) -> Comparison:
        for index, text in texts.items():
            one, other = self.asked[index], wanted[index]
            difference = Difference.between(text, other)
            if difference is None:
                blank.equal += 1
                continue
            gap = None
            if blank.tie:
                gap = score_gap(self.referee.judge, one.prompt, text, other, self.samplings[blank.temperature])
            words = ", ".join(self._word(token) for token in (difference.token, difference.expected))
            blank.different.append(Different(one.suite, one.question.question_id, difference, words, gap))
        return blank

    def _word(self, token: int | None) -> str:
        return "nothing" if token is None else repr(self.tokenizer.decode([token]))


async def run_check(
    config: Config,
    grid: Grid,
    files: Sequence[Path],
    limit: int | None,
    sampling: SamplingParams,
    log: Path | None,
    console: Console,
) -> list[Comparison]:
    """Compare every setting on every question. log: a file with the comparisons of an earlier, interrupted run."""
    questions = {file.stem: read_questions(file, limit) for file in files}
    config = resolved(config)  # a head is found by the model's files
    for setting in grid.settings():  # refused before anything is answered
        registry.check(
            load(settings_of(setting.method, config), {"mode": setting.mode, "transport": setting.transport})
        )
    kept = CheckLog(log, _about(config, questions, sampling, grid))
    tokenizer = tokenizer_of(config)
    asked = [
        AskedQuestion(suite, q, encode_text(tokenizer, q.prompt)) for suite, some in questions.items() for q in some
    ]
    for setting in grid.settings():
        grid.questions_of(setting, len(asked))  # refused before anything is answered
    check = Check(config, tokenizer, asked, sampling, grid)
    with progress_bar(console) as progress:
        await check.read_plain(progress)
        for setting in grid.settings():
            if not kept.has(PLAIN, setting):
                kept.add(await check.compare(setting, progress))
        if 0.0 in grid.temperatures and not kept.has(TRANSFORMERS):  # takes minutes where torch is slow in bfloat16
            try:
                kept.add([await check.compare_with_transformers(progress)])
            except ModelError as error:  # too large for this machine's memory
                console.print(f"not compared with transformers: {error}", soft_wrap=True)
    return kept.done


def _about(
    config: Config, questions: dict[str, list[Question]], sampling: SamplingParams, grid: Grid
) -> dict[str, Any]:
    ids = {suite: [question.question_id for question in some] for suite, some in questions.items()}
    sampled = {"temperatures": list(grid.temperatures), "max_tokens": sampling.max_tokens, "seed": sampling.seed}
    about = {"model": config.model, "dtype": config.dtype, "questions": ids, **sampled}
    if grid.spread:  # the comparisons then depend on the other settings too
        about["spread"] = [list(grid.modes), list(grid.transports), list(grid.threads)]
    return about

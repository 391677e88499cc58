"""`talon check`: is the text of every method and transport that of plain decoding, on your model and your prompts?

Each is compared with the engine's own plain decoding (method none) with the same seed. If the target is exact, every
token that differs is an error; if it is not, `benchmarks.ties` tells rounding from errors. Whether plain decoding
itself is right is shown by `transformers`: greedy texts are compared with those of its generate in float32, ties
allowed, as a target in bfloat16 rounds where that one does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from engine.config import Config, load
from engine.model.resolve import resolved
from engine.sampling import SamplingParams
from engine.text import encode_text, load_tokenizer

from .bench import progress_bar
from .contestants import Contestant, Run, check_name, start_contestant
from .figures import BASELINE, Difference
from .questions import Question, read_questions
from .tables import Table
from .ties import TIE, Referee, score_gap


class Different(msgspec.Struct):
    """A text that differs. words: both tokens as text. gap: of the tokens' float32 scores, None if none is allowed."""

    question_id: str
    difference: Difference
    words: str
    gap: float | None


class Comparison(msgspec.Struct):
    """How one method's answers compare with the reference's. tie: gaps below it are rounding, 0: none is."""

    suite: str
    method: str
    transport: str
    reference: str
    tie: float
    equal: int = 0
    different: list[Different] = []

    @property
    def errors(self) -> list[Different]:
        return [one for one in self.different if one.gap is None or one.gap >= self.tie]


class _Compare:
    """Makes comparisons. The float32 model is loaded when there is a gap to look at, and not before."""

    def __init__(self, config: Config, tokenizer: Any, sampling: SamplingParams):
        self.referee, self.tokenizer, self.sampling = Referee(config), tokenizer, sampling

    def __call__(
        self,
        comparison: Comparison,
        questions: list[Question],
        prompts: list[list[int]],
        runs: list[Run],
        expected: list[Run],
    ) -> Comparison:
        for question, prompt, run, wanted in zip(questions, prompts, runs, expected, strict=True):
            difference = Difference.between(run.token_ids, wanted.token_ids)
            if difference is None:
                comparison.equal += 1
                continue
            gap = None
            if comparison.tie:
                gap = score_gap(self.referee.judge, prompt, run.token_ids, wanted.token_ids, self.sampling)
            words = ", ".join(self._word(token) for token in (difference.token, difference.expected))
            comparison.different.append(Different(question.question_id, difference, words, gap))
        return comparison

    def _word(self, token: int | None) -> str:
        return "nothing" if token is None else repr(self.tokenizer.decode([token]))


async def run_check(
    config: Config,
    methods: list[str],
    transports: list[str],
    files: list[Path],
    limit: int | None,
    sampling: SamplingParams,
    console: Console,
) -> list[Comparison]:
    """Compare every method and transport on every question. Contestants run one after the other: memory stays flat."""
    questions = {file.stem: read_questions(file, limit) for file in files}
    for method in methods:
        check_name(method)
    config = resolved(config)
    tokenizer = load_tokenizer(config.model)
    suites = {suite: [encode_text(tokenizer, q.prompt) for q in some] for suite, some in questions.items()}
    settings = {transport: load(config, {"transport": transport}) for transport in transports}
    compare = _Compare(config, tokenizer, sampling)
    comparisons: list[Comparison] = []
    with progress_bar(console) as progress:
        answers = len(methods) * len(transports) + 1 + (sampling.temperature == 0)
        task = progress.add_task("reference", total=answers * sum(map(len, suites.values())))

        async def answer_all(contestant: Contestant, name: str) -> dict[str, list[Run]]:
            runs: dict[str, list[Run]] = {}
            try:
                for suite, prompts in suites.items():
                    runs[suite] = []
                    for prompt in prompts:
                        progress.update(task, description=f"{name} {suite}")
                        runs[suite].append(await contestant.answer(prompt, sampling))
                        progress.advance(task)
            finally:
                await contestant.close()
            return runs

        def add(method: str, transport: str, reference: str, runs: dict[str, list[Run]], tie: bool) -> None:
            wanted = plain if reference == BASELINE else stock
            limit = TIE[compare.referee.dtype] if tie else 0.0
            for suite, prompts in suites.items():
                blank = Comparison(suite, method, transport, reference, limit)
                comparisons.append(compare(blank, questions[suite], prompts, runs[suite], wanted[suite]))

        plain = await answer_all(await start_contestant(BASELINE, config), "plain decoding")
        exact = all(run.exact for runs in plain.values() for run in runs)
        if sampling.temperature == 0:
            from .peers import TransformersContestant

            in_float32 = load(config, {"dtype": "float32"})
            stock = await answer_all(await TransformersContestant.start(in_float32), "transformers")
            add(BASELINE, config.transport, "transformers", plain, tie=True)
        for transport in transports:
            for method in methods:
                contestant = await start_contestant(method, settings[transport])
                add(method, transport, BASELINE, await answer_all(contestant, f"{transport} {method}"), tie=not exact)
    return comparisons


def report(comparisons: list[Comparison]) -> tuple[Table, list[str]]:
    """A table of the comparisons, and a line for every text that differs by more than a tie."""
    rows: list[list[str]] = []
    lines = []
    for c in comparisons:
        gaps = [one.gap for one in c.different if one.gap is not None]
        rows.append(
            [
                c.transport,
                c.method,
                c.reference,
                c.suite,
                str(c.equal),
                str(len(c.different) - len(c.errors)) if c.tie else "none allowed",
                str(len(c.errors)),
                f"{max(gaps):.1e}" if gaps else "-",
            ]
        )
        for error in c.errors:
            where = f"{c.transport} {c.method}, {c.suite} {error.question_id}"
            lines.append(f"{where}: {error.difference} ({error.words}), compared with {c.reference}")
    columns = ("transport", "method", "against", "suite", "equal", "ties", "different", "gap")
    title = "Texts compared with those of plain decoding (none), and those with transformers in float32"
    return Table(title, columns, rows, words=4), lines

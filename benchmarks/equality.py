"""`talon check`: is the text of every method and transport that of plain decoding, on your model and your prompts?

Greedy answers are compared with `transformers` generate, sampled ones with the engine's own plain decoding with the
same seed. Where two texts differ, `benchmarks.ties` tells rounding from errors.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.bench import progress_bar
from benchmarks.contestants import Contestant, TransformersContestant, check_name, start_contestant
from benchmarks.questions import read_questions
from benchmarks.ties import TIE, score_gap
from engine.config import Config, load
from engine.model.resolve import resolved
from engine.sampling import SamplingParams
from engine.target import Target
from engine.text import encode_text, load_tokenizer


class Comparison(msgspec.Struct):
    """How one method's answers compare with the reference. gaps: float32 gaps of scores where texts first differed."""

    suite: str
    method: str
    transport: str
    equal: int = 0
    gaps: list[float] = msgspec.field(default_factory=list)


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
    exact = Target.load(config.model, "float32", config.device)
    greedy = sampling.temperature == 0
    comparisons = []
    with progress_bar(console) as progress:
        answers = len(methods) * len(transports) + 1
        task = progress.add_task("reference", total=answers * sum(map(len, suites.values())))

        async def answer_all(contestant: Contestant, name: str) -> dict[str, list[list[int]]]:
            texts: dict[str, list[list[int]]] = {}
            try:
                for suite, prompts in suites.items():
                    texts[suite] = []
                    for prompt in prompts:
                        progress.update(task, description=f"{name} {suite}")
                        texts[suite].append((await contestant.answer(prompt, sampling)).token_ids)
                        progress.advance(task)
            finally:
                await contestant.close()
            return texts

        reference = await (TransformersContestant.start(config) if greedy else start_contestant("none", config))
        expected = await answer_all(reference, "reference")
        for transport in transports:
            for method in methods:
                contestant = await start_contestant(method, settings[transport])
                texts = await answer_all(contestant, f"{transport} {method}")
                for suite, prompts in suites.items():
                    comparison = Comparison(suite, method, transport)
                    for prompt, text, wanted in zip(prompts, texts[suite], expected[suite], strict=True):
                        if text == wanted:
                            comparison.equal += 1
                        else:
                            comparison.gaps.append(score_gap(exact, prompt, text, wanted, sampling))
                    comparisons.append(comparison)
    return comparisons


def report(comparisons: list[Comparison], dtype: str) -> tuple[Table, int]:
    """A table of the comparisons, and how many texts differed by more than a tie."""
    table = Table(title=f"Texts compared with the reference, {dtype} (a tie: float32 gap under {TIE[dtype]:g})")
    for column in ("transport", "method", "suite", "equal", "ties", "different", "largest gap"):
        table.add_column(column, justify="right" if column in ("equal", "ties", "different", "largest gap") else "left")
    wrong = 0
    for c in comparisons:
        different = sum(gap >= TIE[dtype] for gap in c.gaps)
        wrong += different
        table.add_row(
            c.transport,
            c.method,
            c.suite,
            str(c.equal),
            str(len(c.gaps) - different),
            str(different),
            f"{max(c.gaps):.1e}" if c.gaps else "-",
        )
    return table, wrong

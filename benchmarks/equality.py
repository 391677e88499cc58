"""`talon check`: is the text of every method and transport that of plain decoding, on your model and your prompts?

Greedy answers are compared with `transformers` generate. Where two texts first differ, both tokens' logits are taken
from a float32 forward: closer than `TIE` they are a tie, which rounding decides; anything else is an error.
Sampled answers are compared with the engine's own plain decoding with the same seed, which must be the same text.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.bench import progress_bar
from benchmarks.contestants import Contestant, TransformersContestant, start_contestant
from benchmarks.questions import read_questions
from engine.config import Config
from engine.sampling import SamplingParams
from engine.target import Target
from engine.text import encode_text, load_tokenizer

TIE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


class Comparison(msgspec.Struct):
    """How one method's answers compare with the reference. gaps: float32 logit gaps where texts first differed."""

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
    tokenizer = load_tokenizer(config.model)
    suites = {file.stem: [encode_text(tokenizer, q.prompt) for q in read_questions(file, limit)] for file in files}
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
                contestant = await start_contestant(method, config.model_copy(update={"transport": transport}))
                texts = await answer_all(contestant, f"{transport} {method}")
                for suite, prompts in suites.items():
                    comparison = Comparison(suite, method, transport)
                    for prompt, text, wanted in zip(prompts, texts[suite], expected[suite], strict=True):
                        if text == wanted:
                            comparison.equal += 1
                        else:
                            comparison.gaps.append(logit_gap(exact, prompt, text, wanted) if greedy else float("inf"))
                    comparisons.append(comparison)
    return comparisons


def logit_gap(target: Target, prompt: list[int], one: list[int], other: list[int]) -> float:
    """The float32 gap between the logits of the two tokens at the first difference; inf if one text is cut short."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None:
        return float("inf")
    text = prompt + one[:at]
    logits, _ = target.prefill(target.new_cache(len(text)), text)
    return abs(float(logits[one[at]] - logits[other[at]]))


class Judge:
    """Tells ties, which rounding decides, from errors; loads the target in float32 when first asked."""

    def __init__(self, config: Config, sampling: SamplingParams):
        self.config, self.greedy = config, sampling.temperature == 0
        self._exact: Target | None = None
        self._tie = 0.0

    def is_tie(self, prompt: list[int], one: list[int], other: list[int]) -> bool:
        """Whether two texts that differ part where two tokens are equally likely."""
        if not self.greedy:
            return False
        if self._exact is None:
            used = Target.load(self.config.model, self.config.dtype, self.config.device).dtype
            self._tie = TIE[str(used).removeprefix("torch.")]
            self._exact = Target.load(self.config.model, "float32", self.config.device)
        return logit_gap(self._exact, prompt, one, other) < self._tie


def report(comparisons: list[Comparison], dtype: str) -> tuple[Table, int]:
    """A table of the comparisons, and how many texts differed by more than a tie."""
    table = Table(title=f"Texts compared with the reference, {dtype} (a tie: float32 logit gap under {TIE[dtype]:g})")
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

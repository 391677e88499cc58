"""`talon qa`: questions that need knowledge, closed-book and with retrieved passages.

A dense index over all passages of the files finds those that go into the prompt. Exact match and F1 belong to the
target: speculation must not change them, so every answer is compared with plain decoding's and any difference is an
error, unless two tokens were as likely as each other (`benchmarks.equality`). A contestant named METHOD+dense drafts
from the passages found, which the target of a closed book never sees.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.bench import progress_bar, start_all
from benchmarks.contestants import Contestant, Run
from benchmarks.figures import BASELINE, Difference
from benchmarks.knowledge import Item, prompt_of, read_items
from benchmarks.squad import exact_match, f1
from benchmarks.ties import Referee
from drafters.checkpoint import TargetWeights
from engine import config as configuration
from engine.config import Config
from engine.errors import ConfigError
from engine.model.resolve import resolved
from engine.sampling import SamplingParams
from engine.text import encode_text, load_tokenizer
from retrieval_index.dense import DenseIndex
from retrieval_index.dense_build import build_dense

DENSE = "+dense"
CLOSED, OPEN = "closed-book", "with passages"


class Line(msgspec.Struct):
    """One method in one setting. exact_match, f1: of the answers with references, None if there are none. ties: answers
    that differ from plain decoding's by rounding. different: those that differ otherwise."""

    setting: str
    method: str
    answers: int
    tokens_per_second: float
    mean_accepted_tokens: float | None
    exact_match: float | None
    f1: float | None
    ties: int
    different: list[str]


class Retrieval(msgspec.Struct):
    """recall_at_1, recall_at_count: share of the questions with passages of their own that found one of these."""

    passages: int
    questions: int
    count: int
    recall_at_1: float
    recall_at_count: float


class Library:
    """The passages of all files behind a dense index, which lives as long as its folder."""

    def __init__(self, config: Config, passages: Sequence[str], folder: Path):
        self.passages, self.tokenizer = passages, load_tokenizer(config.model)
        (folder / "passages.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
        embedding = TargetWeights.read(config.model).embedding.float().numpy()
        self.folder = folder / "index"
        # each passage whole: the index then numbers them as we do
        build_dense(self.tokenizer, embedding, [folder / "passages.jsonl"], self.folder, passage_tokens=10**9)
        self.index = DenseIndex(self.folder, self.tokenizer)

    def find(self, question: str, count: int) -> list[str]:
        """The `count` passages most similar to the question, the best first."""
        tokens = self.tokenizer.encode(question, add_special_tokens=False)
        return [self.passages[passage.number] for passage in self.index.query(tokens, count)]

    def recall(self, items: Sequence[Item], found: Sequence[list[str]]) -> Retrieval:
        """How often a question's own passage was found."""
        own = [
            [text in item.passages for text in texts]
            for item, texts in zip(items, found, strict=True)
            if item.passages
        ]  # fmt: skip
        size = max(1, len(own))
        return Retrieval(
            self.index.header.passages,
            len(own),
            max(map(len, found)),
            sum(row[0] for row in own) / size,
            sum(map(any, own)) / size,
        )


async def run_qa(
    config: Config,
    names: list[str],
    files: list[Path],
    limit: int | None,
    count: int,
    sampling: SamplingParams,
    heads: Path | None,
    console: Console,
) -> tuple[Retrieval | None, list[Line]]:
    """Every question in both settings, or closed-book alone if no file holds passages."""
    read = [read_items(file, limit) for file in files]
    config = resolved(config)
    items = [item for some, _ in read for item in some]
    passages = list(dict.fromkeys(text for _, some in read for text in some))
    methods = list(dict.fromkeys([BASELINE, *names]))
    if not passages:
        if any(name.endswith(DENSE) for name in methods):
            raise ConfigError(f"methods={','.join(names)}: {DENSE} needs passages, and the files hold none")
        return None, await _answer_all(
            CLOSED, config, methods, None, items, [[]] * len(items), sampling, heads, console
        )
    with tempfile.TemporaryDirectory(prefix="talon-qa-") as folder:
        library = Library(config, passages, Path(folder))
        found = [library.find(item.question, count) for item in items]
        lines = []
        for setting, given in ((CLOSED, [[] for _ in items]), (OPEN, found)):
            index = library.folder
            lines += await _answer_all(setting, config, methods, index, items, given, sampling, heads, console)
        return library.recall(items, found), lines


async def _answer_all(
    setting: str,
    config: Config,
    methods: list[str],
    index: Path | None,
    items: list[Item],
    given: Sequence[list[str]],
    sampling: SamplingParams,
    heads: Path | None,
    console: Console,
) -> list[Line]:
    """One setting: contestants start afresh, since some remember answers, and take turns question by question."""
    tokenizer, order = load_tokenizer(config.model), random.Random(sampling.seed)
    contestants = await _start(methods, config, index, heads, console)
    prompts = [
        encode_text(tokenizer, prompt_of(item.question, passages)) for item, passages in zip(items, given, strict=True)
    ]
    answered: dict[str, list[Run]] = {name: [] for name in contestants}
    try:
        with progress_bar(console) as progress:
            task = progress.add_task(setting, total=len(items) * len(contestants))
            for prompt in prompts:
                for name in order.sample(list(contestants), len(contestants)):
                    answered[name].append(await contestants[name].answer(prompt, sampling))
                    progress.advance(task)
    finally:
        for contestant in contestants.values():
            await contestant.close()
    referee, lines = Referee(config), []
    for name, runs in answered.items():
        line = line_of(setting, name, items, runs, tokenizer)
        for item, prompt, mine, plain in zip(items, prompts, runs, answered[BASELINE], strict=True):
            if mine.token_ids != plain.token_ids:
                tie = not mine.exact and referee.is_tie(prompt, mine.token_ids, plain.token_ids, sampling)
                line.ties += tie
                difference = Difference.between(mine.token_ids, plain.token_ids)
                line.different += [] if tie else [f"{item.kind} {item.question_id}: {difference}"]
        lines.append(line)
    return lines


async def _start(
    methods: list[str], config: Config, index: Path | None, heads: Path | None, console: Console
) -> dict[str, Contestant]:
    warm_up = encode_text(load_tokenizer(config.model), "Say hello.")
    contestants = await start_all([m for m in methods if not m.endswith(DENSE)], config, heads, warm_up, console)
    with_index = configuration.load(config, {"drafter.dense": None if index is None else str(index)})
    names = [m.removesuffix(DENSE) for m in methods if m.endswith(DENSE)]
    drafting = await start_all(names, with_index, heads, warm_up, console)
    return contestants | {name + DENSE: contestant for name, contestant in drafting.items()}


def line_of(setting: str, name: str, items: Sequence[Item], runs: Sequence[Run], tokenizer: Any) -> Line:
    """What a method's answers were worth, not yet compared with plain decoding's."""
    texts = [tokenizer.decode(run.token_ids, skip_special_tokens=True).strip() for run in runs]
    scored = [(text, item.references) for text, item in zip(texts, items, strict=True) if item.references]
    rounds = sum(run.rounds or 0 for run in runs)
    return Line(
        setting=setting,
        method=name,
        answers=len(runs),
        tokens_per_second=sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs),
        mean_accepted_tokens=sum(len(run.token_ids) - 1 for run in runs) / rounds if rounds else None,
        exact_match=sum(exact_match(*one) for one in scored) / len(scored) if scored else None,
        f1=sum(f1(*one) for one in scored) / len(scored) if scored else None,
        ties=0,
        different=[],
    )


def table_of(lines: Sequence[Line]) -> Table:
    """Per setting and method."""
    table = Table(title="Knowledge-heavy questions")
    for column in ("setting", "method", "tokens/s", "speed-up", "MAT", "exact match", "F1", "same text", "ties"):
        table.add_column(column, justify="left" if column in ("setting", "method") else "right")
    plain = {line.setting: line.tokens_per_second for line in lines if line.method == BASELINE}
    for line in lines:
        table.add_row(
            line.setting,
            line.method,
            f"{line.tokens_per_second:.1f}",
            f"{line.tokens_per_second / plain[line.setting]:.2f}x",
            "-" if line.mean_accepted_tokens is None else f"{line.mean_accepted_tokens:.2f}",
            "-" if line.exact_match is None else f"{line.exact_match:.3f}",
            "-" if line.f1 is None else f"{line.f1:.3f}",
            f"{line.answers - line.ties - len(line.different)}/{line.answers}",
            str(line.ties),
        )
    return table


def show(retrieval: Retrieval | None, lines: list[Line]) -> None:
    """The table, and how well passages were found."""
    Console().print(table_of(lines))
    if retrieval is not None:
        print(
            f"{retrieval.passages} passages; of {retrieval.questions} questions with passages of their own "
            f"{retrieval.recall_at_1:.0%} found one first, {retrieval.recall_at_count:.0%} among {retrieval.count}"
        )

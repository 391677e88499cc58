"""`talon qa`: questions that need knowledge, closed book, with their own passage and with retrieved ones.

A dense index over all passages of the files finds those that go into the prompt. Scores belong to the target:
speculation must not change them, so every answer is compared with plain decoding's and any difference is an error,
unless two tokens were equally likely (`benchmarks.measure.ties`). datastore drafts from all passages.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.matrices import numbers
from engine import config as configuration
from engine.config import Config
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.text.encode import encode_text
from engine.weights.tokenizer import tokenizer_of
from retrieval_index.build import build
from retrieval_index.dense import DenseIndex
from retrieval_index.dense_build import build_dense

from ..inputs.knowledge import Item, exact_match, f1, prompt_of, quoted, read_items, subspan_match
from ..inputs.questions import AskedQuestion, Question, check_prompts
from ..report.figures import PLAIN, Difference
from ..report.progress import progress_bar
from ..report.qa_figures import ROWS, QaRow, Retrieval, Scores
from .budget import Budget, spend
from .contestants import Contestant, start_contestants, warm_up_prompt
from .plan import MeasurementPlan
from .ties import Referee
from .timed_answer import TimedAnswer

CLOSED, OWN, FOUND = "closed book", "own passage", "retrieved"


class Library:
    """The passages of all files in a dense index and a datastore, which live as long as their folder."""

    def __init__(self, config: Config, passages: Sequence[str], folder: Path):
        self.passages, self.tokenizer = passages, tokenizer_of(config)
        text = folder / "passages.jsonl"
        text.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages))
        embedding = numbers(TargetWeights.read(config.model).embedding).float().numpy()
        dense, self.datastore = folder / "dense", folder / "datastore"
        # Passages are not split: the index then numbers them as we do.
        build_dense(self.tokenizer, embedding, [text], dense, passage_tokens=10**9)
        build(self.tokenizer, [text], self.datastore)
        self.index = DenseIndex(dense, self.tokenizer)

    def find(self, question: str, count: int) -> list[str]:
        """Return the `count` passages most similar to the question, the best first."""
        tokens = self.tokenizer.encode(question, add_special_tokens=False)
        return [self.passages[passage.number] for passage in self.index.query(tokens, count)]

    def recall(self, items: Sequence[Item], found: Mapping[Item, list[str]]) -> Retrieval:
        """Count how often a question's own passage was found."""
        own = [[text in item.passages for text in found[item]] for item in items if item.passages]
        size = max(1, len(own))
        return Retrieval(
            self.index.header.passages,
            len(own),
            max(map(len, found.values())),
            sum(row[0] for row in own) / size,
            sum(map(any, own)) / size,
        )


async def run_qa(plan: MeasurementPlan, count: int, console: Console) -> tuple[Retrieval | None, list[QaRow]]:
    """Ask in each setting that the files allow, and write qa.jsonl as the rows come in. count: of the passages that
    are retrieved into a prompt.
    """
    read = [read_items(file, plan.limit) for file in plan.files]
    if any(file.resolve() == (plan.out / ROWS).resolve() for file in plan.files):
        raise ConfigError(f"--out {plan.out}: its {ROWS} is one of the files of questions; name another folder")
    plan = plan.resolved()
    items = [item for some, _ in read for item in some]
    for (kind, question_id), times in Counter((item.kind, item.question_id) for item in items).items():
        if times > 1:
            raise ConfigError(
                f"--questions: {times} questions of {kind} have the question_id {question_id!r}; rename them"
            )
    passages = list(dict.fromkeys(text for _, some in read for text in some))
    with tempfile.TemporaryDirectory(prefix="talon-qa-") as folder:
        library = Library(plan.config, passages, Path(folder)) if passages else None
        found = {item: library.find(item.question, count) if library else [] for item in items}
        settings: dict[str, dict[Item, Sequence[str]]] = {CLOSED: dict.fromkeys(items, ())}
        if library is not None:
            settings |= {OWN: {item: item.passages for item in items if item.passages}, FOUND: {**found}}
        tokenizer = tokenizer_of(plan.config)
        prompts = {
            setting: {
                item: encode_text(tokenizer, prompt_of(item.question, [*passages])) for item, passages in given.items()
            }
            for setting, given in settings.items()
        }
        asking = _Asking(plan, library, found, prompts, console)
        budget, rows = Budget(plan.minutes), _earlier(plan) if plan.resume else []
        with plan.row_file(ROWS) as results:
            for row in rows:
                results.write(row)
            for number, setting in enumerate(settings):
                done = {(row.kind, row.question_id) for row in rows if row.setting == setting}
                async for row in asking.answers(setting, budget.share(len(settings) - number), done):
                    rows.append(row)
                    results.write(row)
        return None if library is None else library.recall(items, found), rows


@dataclass(frozen=True)
class _Asking:
    """Asks the questions of all settings. found: of every question, the passages most like it. prompts: of every
    setting.
    """

    plan: MeasurementPlan
    library: Library | None
    found: Mapping[Item, list[str]]
    prompts: Mapping[str, Mapping[Item, list[int]]]
    console: Console

    async def answers(self, setting: str, budget: Budget, done: Set[tuple[str, str]]) -> AsyncIterator[QaRow]:
        """Ask in one setting: contestants start afresh, since some remember answers, and take turns question by
        question.

        done: kinds and ids of the questions that an earlier run has asked.
        """
        prompts = {
            item: prompt for item, prompt in self.prompts[setting].items() if (item.kind, item.question_id) not in done
        }
        if not prompts:
            return
        tokenizer, sampling = tokenizer_of(self.plan.config), self.plan.sampling
        order = random.Random(sampling.seed)
        contestants, referee = await self._start(), Referee(self.plan.config)
        kinds: dict[str, list[Item]] = {}
        for item in prompts:
            kinds.setdefault(item.kind, []).append(item)
        ratios: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
        try:
            self._check_prompts(contestants[PLAIN].context)
            with progress_bar(self.console) as progress:
                task = progress.add_task(setting, total=len(prompts))
                for kind, item, resting in spend(kinds, ratios.__getitem__, budget):
                    prompt = prompts[item]
                    asked = [name for name in contestants if name == PLAIN or name not in resting]
                    runs: dict[str, TimedAnswer] = {}
                    for name in order.sample(asked, len(asked)):
                        runs[name] = await contestants[name].answer(prompt, sampling)
                    for name in asked:  # plain decoding first: a reader of a part of the file can compare with it
                        run = runs[name]
                        row = row_of(setting, item, name, run, tokenizer, self.found[item])
                        row = compared(row, run, runs[PLAIN], prompt, sampling, referee)
                        speed_up = row.tokens_per_second * runs[PLAIN].seconds / len(runs[PLAIN].token_ids)
                        ratios[kind].setdefault(name, []).append(speed_up)
                        yield row
                    progress.advance(task)
        finally:
            for contestant in contestants.values():
                await contestant.close()

    def _check_prompts(self, context: int | None) -> None:
        """Check the prompts of every setting, before the first is asked."""
        if context is None:
            return
        asked = (
            AskedQuestion(f"{item.kind}, {setting}", Question(item.question_id, item.kind, [item.question]), prompt)
            for setting, prompts in self.prompts.items()
            for item, prompt in prompts.items()
        )
        check_prompts(asked, self.plan.sampling.max_tokens, context)

    async def _start(self) -> dict[str, Contestant]:
        """Start the contestants; those that draft from the passages are given them."""
        plan, config = self.plan, self.plan.config
        if self.library is not None:
            config = configuration.load(config, {"drafter.datastore": str(self.library.datastore)})
        return await start_contestants(plan.contestants, config, plan.heads, warm_up_prompt(config), self.console)


def _earlier(plan: MeasurementPlan) -> list[QaRow]:
    """Return the rows of an earlier run, which may have been stopped in the middle of a line, and of its
    last question.
    """
    path = plan.out / ROWS
    if not path.exists():
        return []
    try:
        rows = [msgspec.json.decode(line, type=QaRow) for line in path.read_bytes().split(b"\n") if line[-1:] == b"}"]
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--resume: {path} cannot be read ({error}); name another folder with --out") from None
    if unknown := {row.method for row in rows} - {*plan.contestants}:
        raise ConfigError(f"--resume: {path} has rows of {', '.join(sorted(unknown))}: give the same --methods")
    last = [row for row in rows if _question_of(row) == _question_of(rows[-1])]
    return rows if len(last) == len(plan.contestants) else rows[: len(rows) - len(last)]


def _question_of(row: QaRow) -> tuple[str, str, str]:
    return row.setting, row.kind, row.question_id


def row_of(setting: str, item: Item, name: str, run: TimedAnswer, tokenizer: Any, found: Sequence[str]) -> QaRow:
    """Return the measurements of a method's answer, not yet compared with plain decoding's."""
    text = tokenizer.decode(run.token_ids, skip_special_tokens=True).strip()
    accepted = item.references
    scores = (
        Scores(exact_match(text, accepted), f1(text, accepted), subspan_match(text, accepted)) if accepted else None
    )
    return QaRow(
        setting=setting,
        kind=item.kind,
        question_id=item.question_id,
        method=name,
        tokens=len(run.token_ids),
        seconds=run.seconds,
        rounds=run.rounds,
        scores=scores,
        quoted=quoted(text, found),
        output_equal=True,
        tie=False,
    )


def compared(
    row: QaRow, run: TimedAnswer, plain: TimedAnswer, prompt: list[int], sampling: SamplingParams, referee: Referee
) -> QaRow:
    difference = Difference.between(run.token_ids, plain.token_ids)
    if difference is None:
        return row
    tie = not run.exact and referee.is_tie(prompt, run.token_ids, plain.token_ids, sampling)
    return msgspec.structs.replace(row, output_equal=False, tie=tie, difference=str(difference))

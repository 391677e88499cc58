"""`talon bench`: contestants take turns prompt by prompt, since machines drift, and are compared per prompt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from statistics import mean, median

import msgspec
from rich.console import Console

from engine.core.params import SamplingParams
from engine.weights.tokenizer import tokenizer_of

from ..inputs.questions import Question, check_prompts, naming, read_questions
from ..report.figures import PLAIN, ROWS, Difference, Row, loops, speed_ups
from ..report.progress import progress_bar
from .budget import Budget, spend
from .contestants import Contestant, check_name, start_contestants, warm_up_prompt
from .plan import MeasurementPlan
from .ties import Referee
from .timed_answer import TimedAnswer


async def run_bench(plan: MeasurementPlan, console: Console) -> list[Row]:
    """Ask every contestant and write results.jsonl as the rows come in."""
    suites = {file.stem: read_questions(file, plan.limit) for file in plan.files}
    for name in plan.contestants:
        check_name(name)
    plan = plan.resolved()
    warm_up, referee = warm_up_prompt(plan.config), Referee(plan.config)
    first_turns = [plan.encoded(suite, question) for suite, some in suites.items() for question in some]
    rows: list[Row] = []
    budget = Budget(plan.minutes)
    passes = [(repeat, sampling) for repeat in range(plan.repeats) for sampling in plan.samplings]
    with progress_bar(console) as progress, plan.row_file(ROWS) as results:
        task = progress.add_task("starting", total=len(passes) * sum(map(len, suites.values())))
        for number, (repeat, sampling) in enumerate(passes):
            share = budget.share(len(passes) - number)
            contestants = await start_contestants(plan.contestants, plan.config, plan.heads, warm_up, console)
            asking = Asking(contestants, plan, sampling, repeat, referee)

            def ratios(suite: str, temperature: float = sampling.temperature) -> dict[str, list[float]]:
                some = [row for row in rows if (row.suite, row.temperature) == (suite, temperature)]
                return {name: speed_ups(some, name) for name in dict.fromkeys(row.method for row in some)}

            try:
                for context in filter(None, (one.context for one in contestants.values())):
                    check_prompts(first_turns, sampling.max_tokens, context)
                for suite, question, resting in spend(suites, ratios, share):
                    progress.update(task, description=f"T = {sampling.temperature:g}, {suite}", advance=1)
                    for row in await asking.ask(suite, question, resting):
                        rows.append(row)
                        results.write(row)
            finally:
                for contestant in contestants.values():
                    await contestant.close()
    return rows


class Asking:
    """Puts one question after the other to all contestants, in a new random order for each turn."""

    def __init__(
        self,
        contestants: Mapping[str, Contestant],
        plan: MeasurementPlan,
        sampling: SamplingParams,
        repeat: int,
        referee: Referee,
    ):
        self.contestants, self.tokenizer, self.sampling = contestants, tokenizer_of(plan.config), sampling
        self.repeat, self.referee = repeat, referee
        self.order = random.Random(sampling.seed)

    async def ask(self, suite: str, question: Question, resting: Collection[str]) -> list[Row]:
        """Ask all turns of a question, and return them as rows; later turns follow plain decoding's answers, for every
        contestant.
        """
        names = [name for name in self.contestants if name == PLAIN or name not in resting]
        rows: list[Row] = []
        answers: list[str] = []
        for turn in range(1, len(question.turns) + 1):
            prompt = question.encoded(self.tokenizer, answers)
            runs: dict[str, TimedAnswer] = {}
            with naming(suite, question, turn):
                for name in self.order.sample(names, len(names)):
                    runs[name] = await self.contestants[name].answer(prompt, self.sampling)
            plain = runs[PLAIN].token_ids
            answers.append(self.tokenizer.decode(plain, skip_special_tokens=True))
            for name, run in runs.items():
                row = row_of(suite, question, name, self.sampling, self.repeat, run)
                row = compared(row, run.token_ids, plain, prompt, self.sampling, self.referee)
                memory = self.contestants[name].peak_memory_mb()
                where = suite if turn == 1 else f"{suite}, turn {turn}"
                row = msgspec.structs.replace(row, suite=where, turn=turn, prompt_tokens=len(prompt))
                rows.append(msgspec.structs.replace(row, peak_memory_mb=memory))
        return rows


def row_of(suite: str, question: Question, name: str, sampling: SamplingParams, repeat: int, run: TimedAnswer) -> Row:
    """Return the measurements of one answer."""
    log = run.log[1:]
    rounds_ms, tokens_ms = [r.round_us / 1000 for r in log], run.token_ms
    return Row(
        suite=suite,
        question_id=question.question_id,
        method=name,
        temperature=sampling.temperature,
        repeat=repeat,
        tokens=len(run.token_ids),
        seconds=run.seconds,
        rounds=run.rounds,
        mean_accepted_tokens=run.mean_accepted_tokens,
        time_to_first_token_s=run.time_to_first_token_s,
        verifier_busy=run.verifier_busy,
        draft_hit_rate=run.draft_hit_rate,
        output_equal=None,
        loops=loops(run.token_ids),
        round_ms_p50=median(rounds_ms) if log else None,
        round_ms_p95=_p95(rounds_ms) if log else None,
        verify_ms=mean(r.forward_us for r in log) / 1000 if log else None,
        draft_ms=mean(r.draft_us for r in log) / 1000 if log else None,
        nodes=mean(r.nodes for r in log) if log else None,
        accepted=dict(Counter(str(len(r.tokens)) for r in log)),
        token_ms_p50=median(tokens_ms) if tokens_ms else None,
        token_ms_p95=_p95(tokens_ms) if tokens_ms else None,
        # trees drafted ahead were drafted during other rounds, so this is known without overlap only
        other_ms=mean(max(0, r.round_us - r.forward_us - r.draft_us) for r in log) / 1000 if log else None,
        depth=mean(r.depth for r in log) if log else None,
        exact=run.exact,
        inexact=run.inexact,
        activations=run.activations,
        weights=run.weights,
        cached_tokens=run.cached_tokens,
    )


def compared(
    row: Row, text: list[int], plain: list[int], prompt: list[int], sampling: SamplingParams, referee: Referee
) -> Row:
    """Return the row with the result of comparing its text with plain decoding's."""
    if row.method.startswith("hf") and sampling.temperature > 0:  # transformers draws with other random numbers
        return row
    difference = Difference.between(text, plain)
    tie = difference is not None and not row.exact and referee.is_tie(prompt, text, plain, sampling)
    return msgspec.structs.replace(row, output_equal=difference is None, tie=tie, difference=difference)


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]

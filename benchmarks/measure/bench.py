"""`talon bench`: contestants take turns prompt by prompt, since machines drift, and are compared per prompt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
from rich.console import Console

from engine.config import Config
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.text.encode import encode_text
from engine.weights.resolve import resolved
from engine.weights.tokenizer import tokenizer_of
from engine.wire.messages import Tokens

from ..inputs.questions import AskedQuestion, Question, check_prompts, naming, read_questions
from ..report.about import write_about
from ..report.figures import BASELINE, ROWS, Difference, Row, loops, speed_ups, summaries
from ..report.progress import progress_bar
from ..report.records import TimedAnswer
from ..report.row_file import RowFile
from ..report.tables import Table, known
from .budget import Budget, spend
from .contestants import Contestant, check_name, overhead_us, start_contestant
from .starting import start_each
from .ties import Referee


@dataclass(frozen=True)
class Single:
    """What is asked, one request at a time. samplings: one after the other, `repeats` times, each time with new
    engines: a drafter that remembers answers must not see a question twice. minutes: for all of it; None: until
    everything has been asked.
    """

    files: Sequence[Path]
    limit: int | None
    samplings: Sequence[SamplingParams]
    repeats: int = 1
    minutes: float | None = None


async def run_bench(
    config: Config,
    names: Sequence[str],
    what: Single,
    out: Path,
    heads: Path | None,
    console: Console,
) -> list[Row]:
    """Ask every contestant and write `out`/results.jsonl as the rows come in.

    Plain decoding is always among them: the others are compared with its speed and its text.
    """
    suites = {file.stem: read_questions(file, what.limit) for file in what.files}
    for name in names:
        check_name(name)
    names = list(dict.fromkeys([BASELINE, *names]))
    config = resolved(config)
    tokenizer, referee = tokenizer_of(config), Referee(config)
    first_turns = [
        AskedQuestion(suite, q, encode_text(tokenizer, q.prompt)) for suite, some in suites.items() for q in some
    ]
    rows: list[Row] = []
    budget = Budget(what.minutes)
    passes = [(repeat, sampling) for repeat in range(what.repeats) for sampling in what.samplings]
    about = partial(write_about, out, config, what.samplings, what.repeats)
    with progress_bar(console) as progress, RowFile(out / ROWS, about) as results:
        task = progress.add_task("starting", total=len(passes) * sum(map(len, suites.values())))
        for number, (repeat, sampling) in enumerate(passes):
            share = budget.share(len(passes) - number)
            contestants = await start_all(names, config, heads, encode_text(tokenizer, "Say hello."), console)
            asking = Asking(contestants, tokenizer, sampling, repeat, referee)

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
        tokenizer: Any,
        sampling: SamplingParams,
        repeat: int,
        referee: Referee,
    ):
        self.contestants, self.tokenizer, self.sampling = contestants, tokenizer, sampling
        self.repeat, self.referee = repeat, referee
        self.order = random.Random(sampling.seed)

    async def ask(self, suite: str, question: Question, resting: Collection[str]) -> list[Row]:
        """All turns of a question, as rows; later turns follow plain decoding's answers, for every contestant."""
        names = [name for name in self.contestants if name == BASELINE or name not in resting]
        rows: list[Row] = []
        answers: list[str] = []
        for turn in range(1, len(question.turns) + 1):
            prompt = question.encoded(self.tokenizer, answers)
            runs: dict[str, TimedAnswer] = {}
            with naming(suite, question, turn):
                for name in self.order.sample(names, len(names)):
                    runs[name] = await self.contestants[name].answer(prompt, self.sampling)
            plain = runs[BASELINE].token_ids
            answers.append(self.tokenizer.decode(plain, skip_special_tokens=True))
            for name, run in runs.items():
                row = row_of(suite, question, name, self.sampling, self.repeat, run)
                row = compared(row, run.token_ids, plain, prompt, self.sampling, self.referee)
                memory = self.contestants[name].peak_memory_mb()
                where = suite if turn == 1 else f"{suite}, turn {turn}"
                row = msgspec.structs.replace(row, suite=where, turn=turn, prompt_tokens=len(prompt))
                rows.append(msgspec.structs.replace(row, peak_memory_mb=memory))
        return rows


async def start_all(
    names: list[str],
    config: Config,
    heads: Path | None,
    warm_up: list[int],
    console: Console,
) -> dict[str, Contestant]:
    """The contestants that can be started here; for the others, a line says what they lack."""
    for name in names:
        check_name(name)

    async def start(name: str) -> Contestant:
        return await start_contestant(name, config, heads)

    return await start_each(names, start, lambda one: one.answer(warm_up, SamplingParams(max_tokens=24)), console)


def row_of(suite: str, question: Question, name: str, sampling: SamplingParams, repeat: int, run: TimedAnswer) -> Row:
    """The measurements of one answer."""
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
        # trees drafted ahead were drafted during other rounds, so this is only known without overlap
        other_ms=mean(max(0, r.round_us - r.forward_us - r.draft_us) for r in log) / 1000 if log else None,
        depth=mean(r.depth for r in log) if log else None,
        forward_ms=_forward_ms(log),
        exact=run.exact,
        inexact=run.inexact,
        activations=run.activations,
        cached_tokens=run.cached_tokens,
    )


def compared(
    row: Row, text: list[int], plain: list[int], prompt: list[int], sampling: SamplingParams, referee: Referee
) -> Row:
    """The row with the result of comparing its text with plain decoding's."""
    if row.method.startswith("hf") and sampling.temperature > 0:  # transformers draws with other random numbers
        return row
    difference = Difference.between(text, plain)
    tie = difference is not None and not row.exact and referee.is_tie(prompt, text, plain, sampling)
    return msgspec.structs.replace(row, output_equal=difference is None, tie=tie, difference=difference)


def _forward_ms(log: list[Tokens]) -> dict[str, float]:
    """Median time of the target's forwards, by number of nodes."""
    times: dict[int, list[int]] = {}
    for r in log:
        times.setdefault(r.nodes, []).append(r.forward_us)
    return {str(nodes): median(some) / 1000 for nodes, some in sorted(times.items())}


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def summary(rows: list[Row]) -> Table:
    """One line per contestant, over all suites and temperatures given, the fastest first."""
    return Table(
        "All answers" if not any(row.loops for row in rows) else "All answers, loops included",
        ("method", "tokens/s", "speed-up", "95%", "MAT", "TTFT ms", "busy", "same text"),
        [
            [
                line.method,
                f"{line.tokens_per_second:.1f}",
                f"{line.speed_up:.2f}x",
                f"{line.low:.2f}-{line.high:.2f}",
                known(line.mean_accepted_tokens, ".2f"),
                known(line.time_to_first_token_s, ".0f", 1000),
                known(line.verifier_busy, ".0%"),
                line.same_text,
            ]
            for line in sorted(summaries(rows), key=lambda line: -line.speed_up)
        ],
    )


async def run_overhead(config: Config, methods: list[str], sampling: SamplingParams, console: Console) -> Table:
    """Time per round outside model forwards (both workers and their messages), for both transports."""
    prompt = "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes. How much did she earn?"
    rows = []
    config = resolved(config)
    tokens = encode_text(tokenizer_of(config), prompt)
    for transport in ("inproc", "ipc"):
        for method in methods:
            with console.status(f"{transport} {method}"):
                contestant = await start_contestant(method, config.model_copy(update={"transport": transport}))
                try:
                    gaps = [gap for _ in range(4) for gap in overhead_us(await contestant.answer(tokens, sampling))]
                finally:
                    await contestant.close()
            if not gaps:
                raise ConfigError("--overhead: the answers have no round after their first token; raise --max-tokens")
            gaps.sort()
            p50, p95 = (gaps[int(len(gaps) * share)] / 1000 for share in (0.5, 0.95))
            rows.append([transport, method, str(len(gaps)), f"{p50:.2f} ms", f"{p95:.2f} ms"])
    return Table(
        "Time per round outside model forwards", ("transport", "method", "rounds", "p50", "p95"), rows, words=2
    )

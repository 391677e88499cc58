"""`talon bench`: methods interleaved prompt by prompt, for machines drift, compared per prompt, for prompts differ."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import mean, median

import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.contestants import Contestant, Run, overhead_us, start_contestant
from benchmarks.questions import Question, read_questions
from engine.config import Config
from engine.sampling import SamplingParams
from engine.text import encode_text, load_tokenizer

BASELINE = "none"


class Row(msgspec.Struct, frozen=True):
    """One line of results.jsonl."""

    question_id: str
    category: str
    method: str
    mode: str
    temperature: float
    repeat: int
    tokens: int
    rounds: int
    mean_accepted_tokens: float
    tokens_per_second: float
    time_to_first_token_s: float
    verifier_busy: float | None
    draft_hit_rate: float | None
    output_equal: bool | None


async def run_bench(
    config: Config,
    methods: list[str],
    files: list[Path],
    out: Path,
    limit: int | None,
    sampling: SamplingParams,
    repeats: int,
    console: Console,
) -> list[Row]:
    """Answer every question with every method and write `out`/results.jsonl as the rows come in.

    Plain decoding is always among the methods: it is the speed and the text the others are compared with.
    """
    methods = list(dict.fromkeys([BASELINE, *methods]))
    questions = [question for file in files for question in read_questions(file, limit)]
    tokenizer = load_tokenizer(config.model)
    contestants: dict[str, Contestant] = {}
    rows: list[Row] = []
    order = random.Random(sampling.seed)
    try:
        with progress_bar(console) as progress, (out / "results.jsonl").open("w", encoding="utf8") as results:
            task = progress.add_task("starting", total=len(questions) * len(methods) * repeats)
            for method in methods:
                contestants[method] = await start_contestant(method, config)
                await contestants[method].answer(
                    encode_text(tokenizer, questions[0].prompt),
                    msgspec.structs.replace(sampling, max_tokens=min(16, sampling.max_tokens)),
                )
            for repeat in range(repeats):
                for question in questions:
                    prompt = encode_text(tokenizer, question.prompt)
                    runs: dict[str, Run] = {}
                    for method in order.sample(methods, len(methods)):
                        progress.update(task, description=f"{question.category} {method}")
                        runs[method] = await contestants[method].answer(prompt, sampling)
                        progress.advance(task)
                    for method, run in runs.items():
                        row = _row(question, method, config, sampling, repeat, run, runs[BASELINE])
                        rows.append(row)
                        results.write(msgspec.json.encode(row).decode() + "\n")
                    results.flush()
    finally:
        for contestant in contestants.values():
            await contestant.close()
    return rows


def _row(
    question: Question, method: str, config: Config, sampling: SamplingParams, repeat: int, run: Run, plain: Run
) -> Row:
    comparable = method != "hf" or sampling.temperature == 0  # transformers draws with other random numbers
    return Row(
        question_id=question.question_id,
        category=question.category,
        method=method,
        mode=config.mode,
        temperature=sampling.temperature,
        repeat=repeat,
        tokens=len(run.token_ids),
        rounds=run.rounds,
        mean_accepted_tokens=run.mean_accepted_tokens,
        tokens_per_second=len(run.token_ids) / run.seconds,
        time_to_first_token_s=run.time_to_first_token_s,
        verifier_busy=run.verifier_busy,
        draft_hit_rate=run.draft_hit_rate,
        output_equal=run.token_ids == plain.token_ids if comparable else None,
    )


def summary(rows: list[Row]) -> Table:
    """Per method: tokens/s, speed-up over plain decoding (median of the per-prompt ratios), MAT and equality."""
    plain = {(r.question_id, r.category, r.repeat): r.tokens_per_second for r in rows if r.method == BASELINE}
    table = Table(title=f"{len(plain)} answers per method, T = {rows[0].temperature:g}, {rows[0].mode}")
    for column in ("method", "tokens/s", "speed-up", "MAT", "first token", "verifier busy", "same text"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == method]
        ratios = [r.tokens_per_second / plain[r.question_id, r.category, r.repeat] for r in mine]
        busy = [row.verifier_busy for row in mine if row.verifier_busy is not None]
        compared = [row.output_equal for row in mine if row.output_equal is not None]
        table.add_row(
            method,
            f"{mean(row.tokens_per_second for row in mine):.1f}",
            f"{median(ratios):.2f}x",
            f"{mean(row.mean_accepted_tokens for row in mine):.2f}",
            f"{median(row.time_to_first_token_s for row in mine) * 1000:.0f} ms",
            f"{mean(busy):.0%}" if busy else "-",
            f"{sum(compared)}/{len(compared)}" if compared else "-",
        )
    return table


async def run_overhead(config: Config, methods: list[str], sampling: SamplingParams, console: Console) -> Table:
    """Time per round outside model forwards (both workers and their messages), for both transports."""
    prompt = "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes. How much did she earn?"
    table = Table(title="Time per round outside model forwards")
    for column in ("transport", "method", "rounds", "p50", "p95"):
        table.add_column(column, justify="left" if column in ("transport", "method") else "right")
    tokens = encode_text(load_tokenizer(config.model), prompt)
    for transport in ("inproc", "ipc"):
        for method in methods:
            with console.status(f"{transport} {method}"):
                contestant = await start_contestant(method, config.model_copy(update={"transport": transport}))
                try:
                    gaps = [gap for _ in range(4) for gap in overhead_us(await contestant.answer(tokens, sampling))]
                finally:
                    await contestant.close()
            gaps.sort()
            p50, p95 = (gaps[int(len(gaps) * share)] / 1000 for share in (0.5, 0.95))
            table.add_row(transport, method, str(len(gaps)), f"{p50:.2f} ms", f"{p95:.2f} ms")
    return table


def progress_bar(console: Console) -> Progress:
    """What long work shows."""
    return Progress(
        TextColumn("{task.description}"),
        *Progress.get_default_columns()[1:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )

"""`talon train answers`: the target's own answers to many prompts, written as `talon answer` writes them.

`talon answer` is Talon's engine at work. Here the model's plain forward answers in large batches of similar lengths,
which keeps an accelerator busy: the answers are for training heads and for datastores, where last bits do not matter.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from drafters.heads.checkpoint import find_folder
from drafters.training.answers import answer_end, chat, generate
from drafters.training.run import Stage, load_target
from engine.core.params import SamplingParams
from engine.files.answer_rows import AnswerRow, open_answers
from engine.files.prompt_file import read_prompts
from engine.model.loading import eos_tokens
from engine.weights.resolve import resolve


def answer_prompts(
    target: str,
    data: Path,
    out: Path,
    sampling: SamplingParams,
    longest: int,
    batch: int,
    minutes: float | None,
    device: str,
    console: Console,
) -> None:
    """Append an AnswerRow to `out` for each prompt of at most `longest` tokens that it does not answer yet, `batch` of
    them at a time. minutes: no batch is begun that would end later. Raises TalonError, one line.
    """
    began = time.monotonic()
    asked = dict.fromkeys(row.prompt for row in read_prompts(data, "data"))
    known = open_answers(out, target, sampling)
    model, tokenizer = load_target(find_folder(resolve(target, "target"), "target"), device)
    stop = eos_tokens(model.generation_config)
    pad = min(stop, default=0)
    tokens = {prompt: chat(tokenizer, prompt) for prompt in asked if prompt not in known}
    left = [prompt for prompt in tokens if len(tokens[prompt]) <= longest]
    left.sort(key=lambda prompt: len(tokens[prompt]))
    batches = [left[at : at + batch] for at in range(0, len(left), batch)]
    random.Random(sampling.seed).shuffle(batches)  # those that the time leaves out are of any length
    done = written = 0
    with Progress(console=console) as progress, out.open("ab") as file:
        stage, longest_s = Stage(progress, "answering", len(left)), 0.0
        for number, prompts in enumerate(batches):
            batch_began = time.monotonic()
            if minutes is not None and batch_began - began + longest_s > 60 * minutes:
                break
            answers = generate(
                model,
                [tokens[prompt] for prompt in prompts],
                pad,
                sampling.max_tokens,
                sampling.temperature,
                sampling.seed + number,
            )
            for prompt, row in zip(prompts, answers, strict=True):
                answer = row[: answer_end(row, stop)]
                file.write(msgspec.json.encode(_row(prompt, answer, stop, target, sampling, tokenizer)) + b"\n")
                written += len(answer)
            file.flush()
            os.fsync(file.fileno())
            done, longest_s = done + len(prompts), max(longest_s, time.monotonic() - batch_began)
            stage(done)
    seconds = time.monotonic() - began
    console.print(f"{out}: {done:,} of {len(left):,} prompts answered, {written:,} tokens in {seconds:.0f} s")


def _row(
    prompt: str, answer: list[int], stop: frozenset[int], target: str, sampling: SamplingParams, tokenizer: Any
) -> AnswerRow:
    ended = bool(answer) and answer[-1] in stop
    return AnswerRow(
        prompt=prompt,
        model=target,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        finish_reason="eos" if ended else "length",
        text=tokenizer.decode(answer, skip_special_tokens=True),
        tokens=answer,
    )

"""The training text: prompts from a file, answered by the target itself, since a head must predict the target's own
words. Lines that come with the target's answer, as token ids, are not answered again.

`talon answer` is Talon's engine at work. Here the model's plain forward answers in large batches of similar lengths,
which keeps an accelerator busy: the answers are for training heads and for datastores, where last bits do not matter.
Both write the same files. Answers are saved as they come, so a killed run resumes where it stopped, and the heads of
one target share them.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from drafters.training.recipe import Recipe
from drafters.training.target import chat, generate
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.files.answer_rows import AnswerRow, open_answers
from engine.files.prompt_file import PromptRow, read_prompts
from engine.model.loading import eos_tokens


@dataclass(frozen=True)
class Example:
    """A text to train on. tokens: prompt and answer. answer: index of the answer's first token."""

    tokens: list[int]
    answer: int


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt to train on. tokens: ids of the text in the target's chat form. answer: the target's own, where it came
    with the prompt.
    """

    text: str
    tokens: list[int]
    answer: list[int] | None = None


def read_training_prompts(path: Path, tokenizer: Any, recipe: Recipe) -> list[TrainingPrompt]:
    """Return the file's prompts without duplicates, in an order that does not depend on the file's. A prompt stands
    once for each of the answers that come with it, one after the other.
    """
    room = max(recipe.length - recipe.answer_tokens, recipe.length // 2)
    found: dict[str, list[PromptRow]] = {}
    for row in read_prompts(path, "data"):
        rows = found.setdefault(place_of(row.prompt, recipe.seed), [])
        if not rows or (row.tokens is not None and all(row.tokens != other.tokens for other in rows)):
            rows.append(row)
    if len(found) < 2:
        raise ConfigError(f"data={path}: holds {len(found)} prompts: give at least two, one is held out")
    chosen: list[TrainingPrompt] = []
    for row in (row for key in sorted(found) for row in found[key]):
        prompt = chat(tokenizer, row.prompt) if row.prompt_tokens is None else row.prompt_tokens
        fits = len(prompt) <= room if row.tokens is None else len(prompt) + len(row.tokens) <= recipe.length
        if fits and row.tokens != []:
            _check_tokens(path, row, len(tokenizer))
            chosen.append(TrainingPrompt(row.prompt, prompt, row.tokens))
        if len(chosen) == recipe.prompts:
            break
    if len(chosen) < 2:
        raise ConfigError(
            f"data={path}: fewer than two rows fit: prompts into {room} tokens, or with their own `tokens` into "
            f"{recipe.length}: raise `length` in the recipe"
        )
    return chosen


def place_of(prompt: str, seed: int) -> str:
    """Return a text by which prompts are ordered, as if shuffled; those at the end are held out."""
    return hashlib.blake2b(f"{seed}:{prompt}".encode(), digest_size=8).hexdigest()


def _check_tokens(path: Path, row: PromptRow, vocab: int) -> None:
    if not all(0 <= token < vocab for token in [*(row.prompt_tokens or ()), *(row.tokens or ())]):
        raise ConfigError(f"data={path}: tokens of {row.prompt[:30]!r} are not ids of this target: drop the field")


def answer_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Mapping[str, list[int]],
    out: Path,
    name: str,
    sampling: SamplingParams,
    batch: int,
    progress: Callable[[int], None] = lambda done: None,
    minutes: float | None = None,
) -> dict[str, list[int]]:
    """Append an AnswerRow to `out` for each prompt that it does not answer yet, `batch` of them at a time; return all
    answers of the file.

    prompts: token ids by text. name: of the target, for the rows. minutes: no batch is begun that would end later.
    progress: called with how many are done.
    """
    with _written_alone(out):
        began, longest_s, done = time.monotonic(), 0.0, 0
        answers = open_answers(out, name, sampling)
        stop = eos_tokens(model.generation_config)
        left = sorted((text for text in prompts if text not in answers), key=lambda text: len(prompts[text]))
        batches = [left[at : at + batch] for at in range(0, len(left), batch)]
        random.Random(sampling.seed).shuffle(batches)  # prompts that the time leaves out are then of any length
        with out.open("ab") as file:
            for number, texts in enumerate(batches):
                batch_began = time.monotonic()
                if minutes is not None and batch_began - began + longest_s > 60 * minutes:
                    break
                ids, seed = [prompts[text] for text in texts], sampling.seed + number
                rows = generate(model, ids, min(stop, default=0), sampling.max_tokens, sampling.temperature, seed)
                lines = []
                for text, row in zip(texts, rows, strict=True):
                    tokens = answers[text] = row[: _answer_end(row, stop)]
                    ended = "eos" if tokens[-1:] and tokens[-1] in stop else "length"
                    answer = AnswerRow.of(
                        text, name, sampling, ended, tokenizer.decode(tokens, skip_special_tokens=True), tokens
                    )
                    lines.append(msgspec.json.encode(answer) + b"\n")
                file.write(b"".join(lines))
                file.flush()
                os.fsync(file.fileno())
                done, longest_s = done + len(texts), max(longest_s, time.monotonic() - batch_began)
                progress(done)
        return answers


@contextmanager
def _written_alone(out: Path) -> Iterator[None]:
    """Let only one run write the file at a time; a full disk is reported in one line."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(out.with_name(f".{out.name}.lock"), timeout=0):
            yield
    except Timeout:
        raise ConfigError(f"answers={out}: another run is making them: wait for it, or name another file") from None
    except OSError as error:
        raise ConfigError(
            f"answers={out}: cannot be written ({error.strerror}): make room and run again, nothing is lost"
        ) from None


def _answer_end(row: list[int], stop: frozenset[int]) -> int:
    """Return how many of the tokens are the answer's: up to the first that ends it."""
    return next((i + 1 for i, token in enumerate(row) if token in stop), len(row))


def answers_name(target: str, recipe: Recipe) -> str:
    """Return a file name that changes with what the answers to prompts depend on. target: its digest."""
    settings = (target, recipe.answer_tokens, recipe.temperature, recipe.seed)
    return f"answers-{hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()}.jsonl"

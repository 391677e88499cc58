"""The training text: prompts from a file, answered by the target itself, since a head must predict the target's own
words. Answers are saved to disk as they come, so a killed run resumes where it stopped and the heads of one target
share them. Lines that come with the target's answer, as token ids, are not answered again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from drafters.training.recipe import Recipe
from engine.core.errors import ConfigError
from engine.files.prompt_file import PromptRow, read_prompts
from engine.weights.gguf_source import SOURCE


@dataclass(frozen=True)
class Example:
    """tokens: prompt and answer. answer: index of the answer's first token."""

    tokens: list[int]
    answer: int


@dataclass(frozen=True)
class PromptQuestion:
    """prompt: token ids in the target's chat form. answer: the target's own, where it came with the prompt."""

    prompt: list[int]
    answer: list[int] | None = None


def read_questions(path: Path, tokenizer: Any, recipe: Recipe) -> list[PromptQuestion]:
    """The file's prompts without duplicates, in an order that does not depend on the file's."""
    room = max(recipe.length - recipe.answer_tokens, recipe.length // 2)
    rows = {
        hashlib.blake2b(f"{recipe.seed}:{row.prompt}".encode(), digest_size=8).hexdigest(): row
        for row in read_prompts(path, "data")
    }
    if len(rows) < 2:
        raise ConfigError(f"data={path}: holds {len(rows)} prompts: give at least two, one is held out")
    chosen: list[PromptQuestion] = []
    for key in sorted(rows):
        row = rows[key]
        prompt = chat(tokenizer, row.prompt)
        fits = len(prompt) <= room if row.tokens is None else len(prompt) + len(row.tokens) <= recipe.length
        if fits and row.tokens != []:
            _check_tokens(path, row, len(tokenizer))
            chosen.append(PromptQuestion(prompt, row.tokens))
        if len(chosen) == recipe.prompts:
            break
    if len(chosen) < 2:
        raise ConfigError(
            f"data={path}: fewer than two rows fit: prompts into {room} tokens, or with their own `tokens` into "
            f"{recipe.length}: raise `length` in the recipe"
        )
    return chosen


def _check_tokens(path: Path, row: PromptRow, vocab: int) -> None:
    if row.tokens is not None and not all(0 <= token < vocab for token in row.tokens):
        raise ConfigError(f"data={path}: tokens of {row.prompt[:30]!r} are not ids of this target: drop the field")


def answer(
    model: Any,
    prompts: list[list[int]],
    stop: frozenset[int],
    recipe: Recipe,
    cache: Path,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Example]:
    """Every prompt's example; those not yet in `cache` are generated in batches and appended to it."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(cache.with_name(f".{cache.name}.lock"), timeout=0):
            return _answered(model, prompts, stop, recipe, cache, progress)
    except Timeout:
        raise ConfigError(
            f"answers={cache}: another training is making them: wait for it, or name another folder"
        ) from None
    except OSError as error:
        raise _unwritable(cache, error) from None


def _answered(
    model: Any,
    prompts: list[list[int]],
    stop: frozenset[int],
    recipe: Recipe,
    cache: Path,
    progress: Callable[[int], None],
) -> list[Example]:
    examples = _read_cache(cache, prompts)
    pad = min(stop, default=0)
    for at in range(len(examples), len(prompts), recipe.answer_batch):
        batch = prompts[at : at + recipe.answer_batch]
        rows = generate(model, batch, pad, recipe.answer_tokens, recipe.temperature, seed=recipe.seed + at)
        lines = io.StringIO()
        for prompt, row in zip(batch, rows, strict=True):
            answer = row[: answer_end(row, stop)]
            examples.append(Example((prompt + answer)[: recipe.length], len(prompt)))
            lines.write(json.dumps(examples[-1].__dict__) + "\n")
        with cache.open("a", encoding="utf8") as file:
            file.write(lines.getvalue())
            file.flush()
            os.fsync(file.fileno())
        progress(len(examples))
    return examples


def answer_end(row: list[int], stop: frozenset[int]) -> int:
    """How many of the tokens are the answer's: up to the first that ends it."""
    return next((i + 1 for i, token in enumerate(row) if token in stop), len(row))


def target_digest(target: Path) -> str:
    """A digest that tells the weights of targets apart."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(file for kind in ("*.safetensors", "*.bin", SOURCE) for file in target.glob(kind)):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def cache_name(target: str, prompts: list[list[int]], recipe: Recipe) -> str:
    """A file name that changes with whatever the answers depend on: the target (its digest), prompts, and settings."""
    settings = (recipe.answer_tokens, recipe.answer_batch, recipe.temperature, recipe.length, recipe.seed)
    digest = hashlib.blake2b(repr((target, settings, prompts)).encode(), digest_size=8)
    return f"answers-{digest.hexdigest()}.jsonl"


def _unwritable(cache: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"answers={cache}: cannot be written ({error.strerror}): make room and run again, nothing is lost"
    )


def chat(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt's token ids in the target's chat form."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(prompt)["input_ids"])


def _read_cache(cache: Path, prompts: list[list[int]]) -> list[Example]:
    """The examples of a previous run; a last line cut short by a kill is dropped from the file."""
    if not cache.exists():
        return []
    examples: list[Example] = []
    good = 0
    with cache.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                example = Example(**json.loads(line))
            except (ValueError, TypeError):
                raise ConfigError(f"answers={cache}: damaged at line {len(examples) + 1}: remove the file") from None
            if len(examples) == len(prompts) or example.tokens[: example.answer] != prompts[len(examples)]:
                raise ConfigError(f"answers={cache}: belongs to other prompts: remove the file")
            examples.append(example)
            good += len(line)
    os.truncate(cache, good)
    return examples


@torch.inference_mode()
def generate(
    model: Any, batch: list[list[int]], pad: int, tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """Answers of a batch, [batch, up to `tokens`] as lists; prompts are padded on the left. The batch is halved where
    an accelerator's memory is too small for it.
    """
    width = max(map(len, batch))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in batch], device=model.device)
    seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=model.device)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if model.device.type == "cuda":  # a cache that grows is copied with every token
        options |= {"cache_implementation": "static", "disable_compile": True}
    try:
        out = model.generate(ids, attention_mask=seen, max_new_tokens=tokens, pad_token_id=pad, **options)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
    else:
        return out[:, width:].tolist()  # type: ignore[no-any-return]
    torch.cuda.empty_cache()
    half = len(batch) // 2
    return [
        row for part in (batch[:half], batch[half:]) for row in generate(model, part, pad, tokens, temperature, seed)
    ]

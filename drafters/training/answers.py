"""The training text: prompts from a file, answered by the target itself, since its own words are what a head must
foresee. Answers are kept on disk as they come, so a killed run goes on where it stopped and the heads of one target
share them.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from drafters.training.recipe import Recipe
from engine.errors import ConfigError
from engine.json_lines import BadLine, json_lines


@dataclass(frozen=True)
class Example:
    """tokens: prompt and answer. answer: index of the answer's first token."""

    tokens: list[int]
    answer: int


class _Row(msgspec.Struct):
    prompt: Annotated[str, msgspec.Meta(min_length=1)]


def read_prompts(path: Path) -> Iterator[str]:
    """The `prompt` of each line of a JSONL file, plain or .xz."""
    try:
        with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as file:
            for _, row in json_lines(file, _Row):
                yield row.prompt
    except BadLine as error:
        raise ConfigError(
            f'data={path}: line {error.number} is not a JSON object with a "prompt", a text ({error.reason}): give a '
            "JSONL file"
        ) from None
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise ConfigError(f"data={path}: cannot be read ({error}): give a JSONL file, plain or .xz") from None


def encode_prompts(path: Path, tokenizer: Any, recipe: Recipe) -> list[list[int]]:
    """Token ids in the target's chat form, in an order that does not depend on the file's, without repetitions."""
    room = max(recipe.length - recipe.answer_tokens, recipe.length // 2)
    prompts = {
        hashlib.blake2b(f"{recipe.seed}:{prompt}".encode(), digest_size=8).hexdigest(): prompt
        for prompt in read_prompts(path)
    }
    if len(prompts) < 2:
        raise ConfigError(f"data={path}: holds {len(prompts)} prompts: give at least two, one is held out")
    chosen: list[list[int]] = []
    for key in sorted(prompts):
        ids = _chat(tokenizer, prompts[key])
        if len(ids) <= room:
            chosen.append(ids)
        if len(chosen) == recipe.prompts:
            break
    if len(chosen) < 2:
        raise ConfigError(f"data={path}: fewer than two prompts fit into {room} tokens: raise `length` in the recipe")
    return chosen


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
    except OSError as error:
        raise _unwritable(cache, error) from None
    examples = _read_cache(cache, prompts)
    pad = min(stop, default=0)
    for at in range(len(examples), len(prompts), recipe.answer_batch):
        batch = prompts[at : at + recipe.answer_batch]
        rows = _generate(model, batch, pad, recipe, seed=recipe.seed + at)
        lines = io.StringIO()
        for prompt, row in zip(batch, rows, strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in stop), len(row))
            examples.append(Example((prompt + row[:end])[: recipe.length], len(prompt)))
            lines.write(json.dumps(examples[-1].__dict__) + "\n")
        try:
            with cache.open("a", encoding="utf8") as file:
                file.write(lines.getvalue())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritable(cache, error) from None
        progress(len(examples))
    return examples


def cache_name(target: Path, prompts: list[list[int]], recipe: Recipe) -> str:
    """A file name that changes with whatever the answers depend on: the target's weights, the prompts, the settings."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(target.glob("*.safetensors")) + sorted(target.glob("*.bin")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    settings = (recipe.answer_tokens, recipe.answer_batch, recipe.temperature, recipe.length, recipe.seed)
    digest.update(repr((settings, prompts)).encode())
    return f"answers-{digest.hexdigest()}.jsonl"


def _unwritable(cache: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"answers={cache}: cannot be written ({error.strerror}): make room and run again, nothing is lost"
    )


def _chat(tokenizer: Any, prompt: str) -> list[int]:
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
def _generate(model: Any, batch: list[list[int]], pad: int, recipe: Recipe, seed: int) -> list[list[int]]:
    """Answers of a batch, [batch, answer_tokens] as lists; prompts are padded on the left."""
    width = max(map(len, batch))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in batch], device=model.device)
    seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=model.device)
    torch.manual_seed(seed)
    sample: dict[str, Any] = {"do_sample": False}
    if recipe.temperature:
        sample = {"do_sample": True, "temperature": recipe.temperature, "top_k": 0, "top_p": 1.0}
    out = model.generate(ids, attention_mask=seen, max_new_tokens=recipe.answer_tokens, pad_token_id=pad, **sample)
    return out[:, width:].tolist()  # type: ignore[no-any-return]

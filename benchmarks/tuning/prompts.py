"""The prompts of a tuning: most are answered and trained on, some are kept to measure with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, RequestError
from engine.files.prompt_file import read_chats
from engine.install_paths import ROOT
from engine.text.chat import Rendering
from engine.text.encode import encode_text
from engine.text.template import told_the_day

OPEN_PROMPTS = ROOT / "configs" / "train" / "prompts.jsonl.xz"
"""The prompts that come with Talon; NOTICES.txt beside them names their licences."""
LEAST = 32  # prompts, of which a head learns anything at all
_DAY = datetime(2026, 1, 1)
"""What chat templates that name the day are told: a tuning that lasts past midnight goes on with the same prompts."""
_LEAST_MEASURED, _MOST_MEASURED = 8, 24
_MEASURED_SHARE = 10  # one prompt of so many


@dataclass(frozen=True)
class TuningPrompt:
    """A prompt. name: what tells it from others; tokens: its ids, in the model's chat form."""

    name: str
    tokens: list[int]

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest()

    @property
    def asked(self) -> str:
        """A name that tells it from the same prompt in another chat form, of which answers are others."""
        return hashlib.blake2b(repr((self.name, self.tokens)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class TuningPrompts:
    """Prompts to train with and others to measure with, each in an order that does not depend on the file's."""

    trained: list[TuningPrompt]
    measured: list[TuningPrompt]

    @property
    def digest(self) -> str:
        """A digest that tells other prompts, and other chat forms of them, apart."""
        digest = hashlib.blake2b(digest_size=8)
        for one in (*self.trained, *self.measured):
            digest.update(repr((one.name, one.tokens)).encode())
        return digest.hexdigest()


def read_tuning_prompts(path: Path, tokenizer: Any, longest: int) -> TuningPrompts:
    """Read the file's prompts, each once. longest: longer ones, in tokens, are left out. Raises ConfigError."""
    found: dict[str, TuningPrompt] = {}
    total = 0
    for total, row in enumerate(read_chats(path, "prompts"), start=1):
        prompt = row.messages or [] if row.prompt is None else row.prompt
        try:
            with told_the_day(_DAY):
                tokens = encode_text(tokenizer, prompt, rendering=Rendering(tools=row.tools))
        except RequestError as error:
            raise ConfigError(f"prompts={path}: prompt {total} cannot be asked: {error}") from None
        if 0 < len(tokens) <= longest:
            one = TuningPrompt(row.name, tokens)
            found[one.digest] = one
    if len(found) < LEAST:
        raise ConfigError(
            f"prompts={path}: {len(found)} of its {total} prompts have at most {longest} tokens: give at least "
            f"{LEAST}, better hundreds, or leave --prompts out to take those that come with Talon"
        )
    ordered = [found[digest] for digest in sorted(found)]
    measured = min(max(len(ordered) // _MEASURED_SHARE, _LEAST_MEASURED), _MOST_MEASURED)
    return TuningPrompts(ordered[measured:], ordered[:measured])

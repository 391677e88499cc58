"""The answer that every contestant gives before it is measured, as a first request compiles."""

from __future__ import annotations

from engine.config import Config
from engine.core.params import SamplingParams
from engine.text.encode import encode_text
from engine.weights.tokenizer import tokenizer_of

PROMPT = "Say hello."
SAMPLING = SamplingParams(max_tokens=24)


def warm_up_prompt(config: Config) -> list[int]:
    """Return the prompt's token ids. config: resolved."""
    return encode_text(tokenizer_of(config), PROMPT)

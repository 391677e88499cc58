"""Checks requests: prompts become token ids, and what this engine cannot do is refused with a one-line error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from engine.config import Config
from engine.core.errors import OverContext, RequestError, shown
from engine.core.params import SamplingParams
from engine.text.chat import Rendering
from engine.text.encode import encode_text
from engine.wire.messages import Ready

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""Text (one user message), chat messages, or token ids as they are."""

TOO_LONG = "the prompt is too long, this model's maximum context length is"
"""LangChain and LiteLLM know a prompt that does not fit by these words."""


def encode_prompt(
    tokenizer: Any, prompt: Prompt, raw: bool, vocabulary: int, rendering: Rendering | None = None
) -> list[int]:
    """Return the prompt's token ids, all of them known to the model. raw: without the chat template. An empty raw text
    is the token that begins texts, if the tokenizer has one.
    """
    if (tolist := getattr(prompt, "tolist", None)) is not None:  # an array or a tensor
        prompt = tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(f"prompt: is a {type(prompt).__name__}; give text, chat messages or token ids")
    if not prompt and not (raw and isinstance(prompt, str) and tokenizer.bos_token_id is not None):
        raise RequestError("prompt: is empty; give text, chat messages or token ids")
    if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
        tokens = encode_text(tokenizer, prompt, raw, rendering)
        if (highest := max(tokens, default=0)) >= vocabulary:
            raise RequestError(
                f"prompt: the tokenizer makes token {highest} of it, the model knows {vocabulary} tokens: resize "
                "the model's embeddings to the tokenizer, or use the model's own tokenizer"
            )
        return tokens
    tokens = [int(t) for t in prompt if is_integer(t) and 0 <= t < vocabulary]
    if len(tokens) < len(prompt):
        raise RequestError(f"prompt: holds something that is no token id; they go from 0 to {vocabulary - 1}")
    return tokens


def check_room(tokens: list[int], max_tokens: int, context: int) -> None:
    """Refuse a prompt that leaves no space for its answer."""
    if not tokens:
        raise RequestError("prompt: holds no tokens; give more text")
    if (left := context - len(tokens)) < 1:
        raise OverContext(
            f"prompt: its {len(tokens)} tokens leave no room for an answer: {TOO_LONG} {context} tokens; shorten it",
            len(tokens),
            most=context,
        )
    if max_tokens > left:
        raise OverContext(
            f"max_tokens={max_tokens}: with {len(tokens)} tokens before it, {TOO_LONG} {context} tokens; shorten the "
            f"prompt or ask for at most {left}",
            len(tokens),
            max_tokens,
            context,
        )


def check_sampling(sampling: SamplingParams, config: Config, target: Ready) -> None:
    """Refuse what this engine's model or method cannot do."""
    vocabulary = target.vocab_size
    if not all(0 <= token < vocabulary for token in sampling.logit_bias):
        raise RequestError(f"logit_bias={shown(sampling.logit_bias)}: token ids go from 0 to {vocabulary - 1}")
    if not all(0 <= token < vocabulary for token in sampling.stop_token_ids):
        raise RequestError(f"stop_token_ids={shown(sampling.stop_token_ids)}: token ids go from 0 to {vocabulary - 1}")
    for field in ("logprobs", "prompt_logprobs"):
        if (getattr(sampling, field) or 0) > vocabulary:
            raise RequestError(f"{field}={getattr(sampling, field)}: the model knows {vocabulary} tokens")
    say = sampling.speculation
    if say is not None and say.budget is not None and say.budget > config.drafter.budget:
        raise RequestError(
            f"speculation.budget={say.budget}: is over the engine's drafter.budget={config.drafter.budget}"
        )


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether `value` is an integer of Python or numpy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)

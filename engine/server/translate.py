"""Translates a client's request for the engine: prompts as token ids, and the parameters of every choice."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from engine.api import Engine
from engine.sampling import SamplingParams
from engine.server.errors import ApiError
from engine.server.schema import ChatRequest, CompletionRequest, Generation, JsonSchemaFormat, TextFormat
from engine.server.settings import Settings
from engine.server.vocabulary import Vocabulary

_SEEDS = 2**63


@dataclass(frozen=True)
class Wanted:
    """One choice: an answer to a prompt. echo: the prompt's text, shown first. silent: the answer is not shown."""

    prompt: list[int]
    sampling: SamplingParams
    echo: str | None = None
    silent: bool = False


async def chat_choices(body: ChatRequest, engine: Engine, settings: Settings) -> list[Wanted]:
    """The choices of a chat request. Raises RequestError or ApiError."""
    _check(body, body.n, settings)
    prompt = await _encoded([message.plain() for message in body.messages], engine, settings)
    room = engine.target.context - len(prompt)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    more = {"max_tokens": room if body.limit is None else body.limit, "logprobs": logprobs, "grammar": _grammar(body)}
    sampling = _sampling(body, **more)
    return [Wanted(prompt, sampling.of_choice(choice)) for choice in range(body.n)]


async def text_choices(
    body: CompletionRequest, engine: Engine, settings: Settings, vocabulary: Vocabulary
) -> list[Wanted]:
    """The choices of a text completion, those of the first prompt first. Raises RequestError or ApiError."""
    _check(body, body.n * len(body.prompts), settings)
    more = {
        "max_tokens": max(1, body.max_tokens),
        "logprobs": body.logprobs,
        "prompt_logprobs": body.logprobs if body.echo else None,
        "grammar": _grammar(body),
    }
    sampling = _sampling(body, **more)
    wanted = []
    for prompt in body.prompts:
        tokens = await _encoded(prompt, engine, settings)
        text = prompt if isinstance(prompt, str) else vocabulary.texts(prompt)
        echo, silent = text if body.echo else None, not body.max_tokens
        wanted += [Wanted(tokens, sampling.of_choice(choice), echo, silent) for choice in range(body.n)]
    return wanted


async def _encoded(prompt: Any, engine: Engine, settings: Settings) -> list[int]:
    tokens = await engine.encode(prompt, raw=True)
    most = settings.max_prompt_tokens
    if most is not None and len(tokens) > most:
        raise ApiError(400, f"prompt: has {len(tokens)} tokens, this server takes {most}; shorten it", param="prompt")
    return tokens


def _check(body: Generation, choices: int, settings: Settings) -> None:
    if body.model != settings.model:
        message = f"model: {body.model} is not served here; ask for {settings.model}"
        raise ApiError(404, message, code="model_not_found", param="model")
    if choices > settings.max_choices:
        raise ApiError(400, f"n: {choices} answers in one request; this server gives {settings.max_choices}", param="n")


def _sampling(body: Generation, **more: Any) -> SamplingParams:
    """The parameters that all choices share. Fields left open take the model's own values; sampling is the default,
    with a random seed.
    """
    values = {
        "temperature": body.temperature,
        "seed": secrets.randbelow(_SEEDS) if body.seed is None else body.seed,
        "stop": body.stops,
        **{name: getattr(body, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")},
        **{name: getattr(body, name) for name in ("min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty")},
        "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()},
        "speculation": _speculation(body),
        **more,
    }
    return SamplingParams(**values).validate()


def _grammar(body: ChatRequest | CompletionRequest) -> Any:
    wanted = body.response_format if isinstance(body, ChatRequest) else None
    if isinstance(wanted, JsonSchemaFormat):
        return {"json_schema": wanted.json_schema.schema_}
    if wanted is not None and not isinstance(wanted, TextFormat):
        return {"json_object": True}
    if (structure := body.structured_outputs) is None:
        return None
    if structure.choice is not None:
        return {"regex": "|".join(f"({re.escape(choice)})" for choice in structure.choice)}
    if structure.json_ is not None:
        return {"json_schema": structure.json_}
    return {"regex": structure.regex} if structure.regex is not None else {"grammar": structure.grammar}


def _speculation(body: Generation) -> Any:
    return None if body.speculation is None else body.speculation.model_dump(exclude_none=True)

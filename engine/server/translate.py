"""Translates a client's request for the engine: prompts as token ids, and the parameters of every choice."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio.to_thread
import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from engine.api import Engine
from engine.config import Config
from engine.core.errors import OverContext, printable
from engine.core.params import SamplingParams, Speculation
from engine.frontend.admission import Reservation
from engine.frontend.prompts import TOO_LONG
from engine.server.errors import ApiError
from engine.server.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    JsonSchemaFormat,
    TextFormat,
    TokenizeRequest,
)
from engine.server.settings import Settings
from engine.server.tools.calling import Calling, ClientNames
from engine.server.vocabulary import Vocabulary
from engine.text.chat import Rendering
from engine.text.fill_in import FillIn

_SEEDS = 2**63
_OPENING = 16  # tokens at a prompt's end that may begin reasoning


@dataclass(frozen=True)
class ChoiceRequest:
    """One choice: an answer to a prompt. sampling: a choice of what the engine has checked. echo: the prompt's text,
    shown first. silent: the answer is not shown. shown: special tokens that are part of its text. thinking: it begins
    within reasoning.
    """

    prompt: list[int]
    sampling: SamplingParams
    echo: str | None = None
    silent: bool = False
    shown: frozenset[int] = frozenset()
    thinking: bool = False


def places_for(body: Generation, choices: int, engine: Engine, settings: Settings) -> Reservation:
    """Reserve places for all choices of a request, before its prompts are tokenised. Raises QueueFull or ApiError."""
    check_model(body.model, settings)
    most = min(settings.max_choices, engine.config.queue.size)
    if choices > most:
        raise ApiError(400, f"n: {choices} answers in one request (prompts times n); {most} are the most", param="n")
    return engine.reserve(choices)


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """Return the chat request that another API's request is translated to. Raises RequestValidationError."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(errors) from None


async def chat_prompt(body: ChatRequest, engine: Engine, settings: Settings, calling: Calling) -> list[int]:
    """Return the tokens of a chat request's messages. Raises RequestError or ApiError."""
    messages, rendering = _templated(body, calling)
    return await _encoded("messages", messages, engine, settings, rendering)


async def count_prompt(body: ChatRequest, engine: Engine, calling: Calling) -> int:
    """Return how many tokens a chat request's messages have, however many those are. Raises RequestError."""
    messages, rendering = _templated(body, calling)
    return len(await engine.tokenize(messages, raw=True, rendering=rendering))


def _templated(body: ChatRequest, calling: Calling) -> tuple[list[dict[str, Any]], Rendering]:
    """Return what the chat template takes."""
    return [message.plain() for message in body.messages], replace(body.rendering, tools=calling.shown)


async def chat_choices(
    body: ChatRequest, engine: Engine, settings: Settings, vocabulary: Vocabulary, calling: Calling
) -> list[ChoiceRequest]:
    """Return the choices of a chat request. Raises RequestError or ApiError."""
    prompt = await chat_prompt(body, engine, settings, calling)
    calling = calling.after(vocabulary.texts(prompt[-_OPENING:]))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = _limit(body.limit, engine.target.context - len(prompt), settings)
    more: dict[str, Any] = {"max_tokens": limit, "logprobs": logprobs}
    if calling.needs_grammar:
        more["grammar"] = await anyio.to_thread.run_sync(calling.grammar)
    elif calling.answer is not None:
        more["grammar"] = {"json_schema": calling.answer.followed}
    sampling = _sampling(body, engine, **more)
    thinking = calling.wanted.thinking and (calling.needs_grammar or sampling.grammar is None)
    choices = (sampling.of_choice(choice) for choice in range(body.n))
    return [ChoiceRequest(prompt, one, shown=calling.marks, thinking=thinking) for one in choices]


async def text_choices(
    body: CompletionRequest, engine: Engine, settings: Settings, vocabulary: Vocabulary, fill_in: FillIn | None
) -> list[ChoiceRequest]:
    """Return the choices of a text completion, those of the first prompt first. fill_in: how the model fills in, None
    if it cannot. Raises RequestError or ApiError.
    """
    more: dict[str, Any] = {
        "max_tokens": _limit(body.limit, engine.target.context, settings),
        "logprobs": body.logprobs,
        "prompt_logprobs": body.logprobs if body.echo else None,
    }
    if body.suffix is not None:
        if fill_in is None:
            message = "suffix: this model has no tokens for filling in; leave it out, or ask a model of code"
            raise ApiError(400, message, code="unsupported", param="suffix")
        more["stop_token_ids"] = (*(body.stop_token_ids or ()), *fill_in.ends)
    sampling = _sampling(body, engine, **more)
    wanted = []
    for prompt in body.prompts:
        asked: Any = prompt
        if body.suffix is not None and fill_in is not None and isinstance(prompt, str):
            asked = await anyio.to_thread.run_sync(fill_in.prompt, prompt, body.suffix)
        tokens = await _encoded("prompt", asked, engine, settings)
        limit = _limit(body.limit, engine.target.context - len(tokens), settings)
        fitting = sampling.limited(limit)
        text = prompt if isinstance(prompt, str) else vocabulary.texts(prompt)
        echo, silent = text if body.echo else None, not body.max_tokens
        wanted += [ChoiceRequest(tokens, fitting.of_choice(choice), echo, silent) for choice in range(body.n)]
    return wanted


def owned(wanted: Sequence[ChoiceRequest], owner: str | None, config: Config) -> list[ChoiceRequest]:
    """Return the choices, drafted for from the earlier answers of `owner` alone, or of all where the operator shares
    them.
    """
    whose = "" if config.drafter.share_answers else owner

    def of(sampling: SamplingParams) -> SamplingParams:
        say = msgspec.structs.replace(sampling.speculation or Speculation(), owner=whose)
        return msgspec.structs.replace(sampling, speculation=say)

    return [replace(one, sampling=of(one.sampling)) for one in wanted]


def names_of(
    body: ChatRequest | CompletionRequest | TokenizeRequest, client: ClientNames | None = None
) -> dict[str, str]:
    """Return what the client calls the engine's fields, where it uses other names. client: those of an API whose
    requests are translated to chat requests.
    """
    own = {} if client is None else client.fields
    names = dict(own)
    if not isinstance(body, CompletionRequest) and body.messages is not None:
        names["prompt"] = "messages"
    if isinstance(body, ChatRequest):
        names["max_tokens"] = body.limit_name
    if isinstance(body, Generation):
        tools = isinstance(body, ChatRequest) and body.tools is not None and body.tool_choice != "none"
        names["grammar"] = "tools" if tools else _grammar(body)[0]
    return {field: own.get(name, name) for field, name in names.items()}


def _limit(asked: int | None, room: int, settings: Settings) -> int:
    """Return the maximum of an answer's tokens. None: the rest of the context. Of 0 the engine makes one, not shown."""
    if asked is None:
        return room
    return max(1, min(asked, room) if settings.clamp_max_tokens else asked)


async def _encoded(
    field: str, prompt: Any, engine: Engine, settings: Settings, rendering: Rendering | None = None
) -> list[int]:
    tokens = await engine.encode(prompt, raw=True, rendering=rendering)
    most = settings.max_prompt_tokens
    if most is not None and len(tokens) > most:
        message = (
            f"{field}: has {len(tokens)} tokens, this server takes {most}: {TOO_LONG} {engine.target.context} tokens, "
            f"and {most} of a prompt here; shorten it"
        )
        raise OverContext(message, len(tokens), most=most)
    return tokens


def check_model(model: str, settings: Settings) -> None:
    """Refuse another model than the one that is served. An empty name means that one, as editors send it."""
    if model not in ("", settings.model):
        message = f"model: {printable(model, 100)} is not served here; ask for {settings.model}"
        raise ApiError(404, message, code="model_not_found", param="model")


def _sampling(body: Generation, engine: Engine, **more: Any) -> SamplingParams:
    """Return the parameters that all choices share, which the engine has checked. Fields left open take the model's own
    values; sampling is the default, with a random seed. Raises RequestError.
    """
    values = {
        "temperature": body.temperature,
        "seed": secrets.randbelow(_SEEDS) if body.seed is None else body.seed,
        "stop": body.stops,
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        **{name: getattr(body, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")},
        **{name: getattr(body, name) for name in ("min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty")},
        "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()},
        "grammar": _grammar(body)[1],
        "speculation": _speculation(body),
        **more,
    }
    return engine.check(SamplingParams(**values))


def _grammar(body: Generation) -> tuple[str, Any]:
    """Return the field that says what the answer must look like, and the engine's grammar for it."""
    wanted = body.response_format if isinstance(body, ChatRequest) else None
    if isinstance(wanted, JsonSchemaFormat):
        return "response_format.json_schema.schema", {"json_schema": wanted.json_schema.schema_}
    if wanted is not None and not isinstance(wanted, TextFormat):
        return "response_format", {"json_object": True}
    if (structure := body.structured_outputs) is None:
        return "structured_outputs", None
    if structure.choice is not None:
        choices = "|".join(f"({re.escape(choice)})" for choice in structure.choice)
        return "structured_outputs.choice", {"regex": choices}
    if structure.json_ is not None:
        return "structured_outputs.json", {"json_schema": structure.json_}
    if structure.regex is not None:
        return "structured_outputs.regex", {"regex": structure.regex}
    return "structured_outputs.grammar", {"grammar": structure.grammar}


def _speculation(body: Generation) -> Any:
    return None if body.speculation is None else body.speculation.model_dump(exclude_none=True)

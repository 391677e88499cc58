"""What a client gets: OpenAI's objects, plus Talon's own figures."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, RootModel

from engine.server.reading.progress import Timings

FinishReason = Literal["stop", "length", "tool_calls"]
OpenApiResponses = dict[int | str, dict[str, Any]]
"""What OpenAPI's document says of a route's answers, by status, as FastAPI takes it."""


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens. cached_tokens: tokens of the prompt that the prefix cache had, for
    every choice.
    """

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of the prompt (once, however many choices) and of all answers. prompt_tokens_details: None before
    the end of a stream.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TopLogprob(BaseModel):
    """A token that might have been drawn. bytes: its UTF-8; one character may span several tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class TextLogprobs(BaseModel):
    """Log-probabilities of a text completion. The prompt's first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenSource(BaseModel):
    """A token and who proposed it: `target` (nobody did), `retrieval` or `head`."""

    token: str
    source: str


class ToolFunction(BaseModel):
    """The function of a call. arguments: the text of a JSON object that follows the tool's schema."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: ToolFunction


class ChatMessage(BaseModel):
    """The message that answers a chat. content: None where the answer only calls tools. reasoning_content: what comes
    before the answer.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    sources: list[TokenSource] | None = None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    sources: list[TokenSource] | None = None


class SpeculativeDecoding(BaseModel):
    """Rounds that had a draft, the tokens drafted and accepted, and how many were accepted at each place of a draft."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]


class AnswerMetrics(BaseModel):
    """How an answer, or several choices together, was produced. decoding_s: from the first token to the last, by
    the verifier's clock; the longest of several choices. exact: the text is that of plain decoding. activations:
    how products took their rows. weights: the type of most matrices. kv_type: what keys and values were kept as.
    ignored: the request's fields that had no effect.
    """

    rounds: int
    mean_accepted_tokens: float
    tokens_per_second: float
    time_to_first_token_s: float
    decoding_s: float
    exact: bool
    activations: str
    kv_type: str
    weights: str
    ignored: list[str]
    speculative_decoding: SpeculativeDecoding


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage
    metrics: AnswerMetrics
    timings: Timings


class ChatCompletion(_Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class TextCompletion(_Answer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class Model(BaseModel):
    """The served model. Its context has as many names as there are clients that look for it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "talon"
    max_model_len: int
    context_length: int
    max_input_tokens: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class PromptState(BaseModel):
    """A prompt that is being read: tokens read of how many, those found in the prefix cache, estimated seconds left."""

    read: int
    total: int
    cached: int
    left_s: float


class ChangeSeen(BaseModel):
    """A text that was another in an earlier prompt, though the text after it was the same. at: tokens before it;
    tokens: its own; behind: tokens after it that were read again; times: how often. text: with --log-prompts, on a
    server without keys.
    """

    at: int
    tokens: int
    behind: int
    times: int
    text: str | None


class Prompts(BaseModel):
    """The prompts of all clients so far: their tokens, those found in the prefix cache and those read again behind a
    change; the changes; and the long prompts that are being read.
    """

    tokens: int
    cached: int
    behind_changes: int
    changes: list[ChangeSeen]
    reading: list[PromptState]


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """An error of Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class InputTokens(BaseModel):
    input_tokens: int


class JsonObject(RootModel[dict[str, Any]]):
    """A JSON object of another API."""


class Version(BaseModel):
    version: str
    activations: str
    kv_type: str
    weights: str


class Status(BaseModel):
    status: str


class ErrorDetail(BaseModel):
    """What is wrong with a request. param: the field that is wrong, if any."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail


Chunk = dict[str, Any]
"""An event of a stream, as JSON."""


def named_event(chunk: Chunk) -> bytes:
    """Return a server-sent event with the chunk's `type` as its name."""
    return f"event: {chunk['type']}\n".encode() + b"data: " + msgspec.json.encode(chunk) + b"\n\n"

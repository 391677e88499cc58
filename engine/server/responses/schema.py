"""What a client of OpenAI's responses may ask for. What is not defined here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from engine.server.body import Body, Ignored, SentBack
from engine.server.schema import JsonObjectFormat, SpeculationFields, TextFormat
from engine.server.tools.schema import AskedFunction, CalledFunction


class ContentText(Body):
    """A part of a message. Pictures, files and sound are not supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: SentBack = False
    logprobs: SentBack = False


class MessageItem(Body):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentText]
    id: SentBack = False
    status: SentBack = False
    phase: SentBack = False


class FunctionCallItem(CalledFunction):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    id: SentBack = False
    status: SentBack = False


class FunctionOutputItem(Body):
    """What a call has brought."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ContentText]
    id: SentBack = False
    status: SentBack = False


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: SentBack = False
    encrypted_content: SentBack = False
    id: SentBack = False
    status: SentBack = False


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="type: is none of message, function_call, function_call_output and reasoning",
    ),
]


class FunctionTool(AskedFunction):
    """A function that an answer may call. OpenAI's own tools, such as web search, are not there."""

    type: Literal["function"]
    defer_loading: Ignored = False


class NamedFunctionTool(Body):
    type: Literal["function"]
    name: str


class JsonFormat(Body):
    """JSON that follows a schema. It is always followed strictly."""

    type: Literal["json_schema"]
    name: str = Field("answer", min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: Annotated[TextFormat | JsonObjectFormat | JsonFormat, Field(discriminator="type")] | None = None
    verbosity: Ignored = False


class ResponsesRequest(Body):
    """POST /v1/responses."""

    model: str
    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, description="A response that this one goes on from.")
    store: bool = Field(True, description="Whether the response can be gone on from, and got again.")
    tools: Annotated[list[FunctionTool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool = False
    background: Literal[False] = False
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(None, description="Reasoning is always plain.")
    top_logprobs: Literal[0] = Field(0, description="Log-probabilities are in /v1/chat/completions.")
    truncation: Literal["disabled"] = "disabled"
    metadata: dict[str, str] | None = None
    user: str | None = Field(None, max_length=512)

    # Without effect.
    max_tool_calls: Ignored = False
    prompt_cache_key: Ignored = False
    prompt_cache_retention: Ignored = False
    reasoning: Ignored = False
    safety_identifier: Ignored = False
    service_tier: Ignored = False
    stream_options: Ignored = False

    # Beyond OpenAI.
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    chat_template_kwargs: dict[str, Any] | None = None
    speculation: SpeculationFields | None = None

    @model_validator(mode="after")
    def _names_one_of_the_tools(self) -> ResponsesRequest:
        names = [tool.name for tool in self.tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"tools: has {twice!r} twice; name each tool once")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: needs tools")
        if isinstance(self.tool_choice, NamedFunctionTool) and self.tool_choice.name not in names:
            raise ValueError(f"tool_choice.name: {self.tool_choice.name[:64]!r} is none of the tools {names[:8]}")
        return self

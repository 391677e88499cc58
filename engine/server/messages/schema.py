"""What a client of Anthropic's API may ask for. What is not defined here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from engine.core.params import LONGEST_STOP, MOST_STOPS
from engine.server.body import Body, Ignored, SentBack
from engine.server.schema import SpeculationFields
from engine.server.tools.schema import ToolName


class TextBlock(Body):
    """Text. Pictures and documents are not supported."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = False
    citations: SentBack = False


class ThinkingBlock(Body):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: SentBack = False
    cache_control: Ignored = False


class RedactedThinkingBlock(Body):
    """Reasoning that another server has hidden: it is left out."""

    type: Literal["redacted_thinking"]
    data: SentBack = False


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, Any]
    cache_control: Ignored = False
    caller: SentBack = False


class ToolResultBlock(Body):
    """What a call has brought."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool = False
    cache_control: Ignored = False


ContentBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class InputMessage(Body):
    """A message. Results of tools are the user's, calls the assistant's."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> InputMessage:
        kinds = {block.type for block in self.content} if isinstance(self.content, list) else set()
        if self.role != "user" and "tool_result" in kinds:
            raise ValueError("content: a tool_result is part of a user's message")
        if self.role != "assistant" and kinds & {"tool_use", "thinking", "redacted_thinking"}:
            raise ValueError("content: tool_use and thinking are parts of an assistant's message")
        return self


class ClientTool(Body):
    """A tool of the client's. Anthropic's own, such as web search, are not there."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Ignored = False
    eager_input_streaming: Ignored = False

    @field_validator("input_schema")
    @classmethod
    def _is_of_an_object(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("type", "object") != "object":
            raise ValueError('should be the schema of an object: {"type": "object", "properties": {...}}')
        return value


class ToolUse(Body):
    """auto: tools may be called; any: one has to be; tool: that of `name`; none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolUse:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name: belongs to the type 'tool'")
        return self


class Thinking(Body):
    """Whether to reason, for chat templates with the variable enable_thinking. The budget changes nothing."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = False
    display: Ignored = False


class JsonOutput(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """format: JSON that follows a schema."""

    format: JsonOutput | None = None
    effort: Ignored = False


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=512)] | None = None
    tool_choice: ToolUse | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    # Without effect.
    cache_control: Ignored = False
    context_management: Ignored = False

    @model_validator(mode="after")
    def _names_one_of_the_tools(self) -> CountRequest:
        names = [tool.name for tool in self.tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"tools: has {twice!r} twice; name each tool once")
        if self.tool_choice is not None and self.tool_choice.type in ("any", "tool") and not names:
            raise ValueError("tool_choice: needs tools")
        chosen = None if self.tool_choice is None else self.tool_choice.name
        if chosen is not None and chosen not in names:
            raise ValueError(f"tool_choice.name: {chosen[:64]!r} is none of the tools {names[:8]}")
        return self


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)]
        | None
    ) = None
    stream: bool = False
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)

    # Without effect.
    metadata: Ignored = False
    service_tier: Ignored = False
    inference_geo: Ignored = False

    # Beyond Anthropic.
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    speculation: SpeculationFields | None = None

"""What a client of Anthropic's API may ask for. What is not defined here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from engine.core.params import LONGEST_STOP, MOST_STOPS
from engine.server.body import Body, Ignored, SentBack
from engine.server.schema import SpeculationFields
from engine.server.tools.schema import ToolName


class LeftOut(Body):
    """A part that this server has nothing for, whatever is in it. It is left out, and named by its type."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def ignored(self) -> list[str]:
        return [self.type]


class TextBlock(Body):
    """Text. Pictures and documents are taken as results of tools alone, where a text stands for them."""

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
    cache_control: Ignored = False


class ServerToolBlock(LeftOut):
    """What a tool of another server's did in an earlier answer."""

    type: str = Field(pattern=r"^(server_tool_use|mcp_tool_use|[a-z_]{1,64}_tool_result)$")


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, Any]
    cache_control: Ignored = False
    caller: SentBack = False


class ImageBlock(LeftOut):
    """A picture that a call returned: its place is kept."""

    type: Literal["image"]

    @property
    def text(self) -> str:
        return "[an image was here: this model reads text alone]"


class DocumentBlock(LeftOut):
    """A document that a call returned: its place is kept."""

    type: Literal["document"]
    title: str | None = None

    @property
    def text(self) -> str:
        title = f" {self.title!r}" if self.title else ""
        return f"[a document{title} was here: this model reads text alone]"


class SearchResultBlock(Body):
    """A text that a call has found, and where."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: Ignored = False
    cache_control: Ignored = False

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class ToolReferenceBlock(Body):
    """A tool that a search has found. All tools are in the prompt, so its name is enough."""

    type: Literal["tool_reference"]
    tool_name: ToolName
    cache_control: Ignored = False

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} can be called."


ResultPart = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, Field(discriminator="type")
]


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool = False
    cache_control: Ignored = False
    toolset_name: SentBack = False


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _kind(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if kind in _BLOCKS else "server" if isinstance(kind, str) and "tool" in kind else kind


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ServerToolBlock, Tag("server")],
    Discriminator(
        _kind, custom_error_type="unknown_block", custom_error_message=f"type: is none of {', '.join(_BLOCKS)}"
    ),
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
    """A tool of the client's."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: Ignored = False
    cache_control: Ignored = False
    defer_loading: Ignored = False
    eager_input_streaming: Ignored = False
    input_examples: Ignored = False

    @field_validator("input_schema")
    @classmethod
    def _is_of_an_object(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("type", "object") != "object":
            raise ValueError('should be the schema of an object: {"type": "object", "properties": {...}}')
        return value


class ServerTool(LeftOut):
    """A tool of Anthropic's own, such as web search, of which the model is not told."""

    type: str = Field(pattern=r"^([a-z_]{1,64}_[0-9]{8}|mcp_toolset)$")


def _side(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "client" if kind in (None, "custom") else "server"


AnyTool = Annotated[Annotated[ClientTool, Tag("client")] | Annotated[ServerTool, Tag("server")], Discriminator(_side)]


class ToolUse(Body):
    """Whether and which tools are to be called. auto: tools may be called; any: one has to be; tool: that of `name`;
    none.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolUse:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name: belongs to the type 'tool'")
        return self


class Thinking(Body):
    """Whether to reason, for chat templates with the variable enable_thinking. Without it there is no reasoning. The
    budget changes nothing.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    block_binding: Ignored = False
    budget_tokens: Ignored = False
    display: Ignored = False


class JsonOutput(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What form the answer has. format: JSON that follows a schema."""

    format: JsonOutput | None = None
    effort: Ignored = False
    task_budget: Ignored = False


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=512)] | None = None
    tool_choice: ToolUse | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    # Without effect.
    betas: Ignored = False
    cache_control: Ignored = False
    context_management: Ignored = False
    diagnostics: Ignored = False
    speed: Ignored = False

    @property
    def client_tools(self) -> dict[int, ClientTool]:
        """The client's own tools, by their places."""
        return {place: tool for place, tool in enumerate(self.tools or ()) if isinstance(tool, ClientTool)}

    @model_validator(mode="after")
    def _names_one_of_the_tools(self) -> CountRequest:
        names = [tool.name for tool in self.client_tools.values()]
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

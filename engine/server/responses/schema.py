"""What a client of OpenAI's responses may ask for. What is not defined here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from engine.server.body import Body, Ignored
from engine.server.responses.items import AdditionalToolsItem, Item
from engine.server.responses.tools import AskedTool, ToolChoice
from engine.server.schema import JsonObjectFormat, SpeculationFields, TextFormat


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


_PLAIN = "reasoning.encrypted_content"  # reasoning comes back as it is, and may be sent again


class ResponsesRequest(Body):
    """POST /v1/responses."""

    model: str = Field("", description="Without a name, the model that is served.")
    input: str | Annotated[list[Item], Field(max_length=4096, fail_fast=True)] = Field(
        [], description="Without it the response goes on from what is there: instructions, or an earlier response."
    )
    instructions: str | None = None
    previous_response_id: str | None = Field(None, description="A response that this one goes on from.")
    store: bool = Field(True, description="Whether the response can be gone on from, and got again.")
    tools: Annotated[list[AskedTool], Field(max_length=512)] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool = False
    background: Literal[False] = False
    include: Annotated[list[str], Field(max_length=64)] | None = Field(
        None, description="Reasoning is always plain; nothing else is added."
    )
    top_logprobs: Literal[0] = Field(0, description="Log-probabilities are in /v1/chat/completions.")
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="What does not fit into the context is refused, also with `auto`."
    )
    metadata: dict[str, str] | None = None
    user: str | None = Field(None, max_length=512)

    # Without effect.
    client_metadata: Ignored = False
    context_management: Ignored = False
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

    @property
    def added_tools(self) -> list[AskedTool]:
        """The tools that the input adds to those of the request."""
        items = self.input if isinstance(self.input, list) else []
        return [tool for item in items if isinstance(item, AdditionalToolsItem) for tool in item.tools]

    @property
    def ignored(self) -> list[str]:
        names = set(super().ignored)
        names |= {"truncation"} if self.truncation == "auto" else set()
        names |= {"include"} if set(self.include or ()) - {_PLAIN} else set()
        return sorted(names)

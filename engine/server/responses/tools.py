"""The tools of OpenAI's responses, as clients write them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from engine.server.body import Body, Ignored
from engine.server.schema import TextFormat
from engine.server.tools.schema import AskedFunction, ToolName


class FunctionTool(AskedFunction):
    """A function that an answer may call."""

    type: Literal["function"]
    allowed_callers: Ignored = False
    defer_loading: Ignored = False
    output_schema: Ignored = False


class GrammarText(Body):
    """A text that follows a grammar, where that is or can be written as a regular expression; any text elsewhere."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = Field(max_length=20_000)


class CustomTool(Body):
    """A tool that takes one text instead of arguments."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[TextFormat | GrammarText, Field(discriminator="type")] | None = None
    allowed_callers: Ignored = False
    defer_loading: Ignored = False


class NamespaceTool(Body):
    """Tools under a common name, with which a call of them comes back."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]] = Field(max_length=512)


class LocalShellTool(Body):
    """A shell of the client's, to which an answer gives commands."""

    type: Literal["local_shell"]


class HostedTool(Body):
    """A tool that OpenAI runs or has trained its models for. It is left out, and the log says so."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal[
        "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search",
        "image_generation", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
        "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    ]  # fmt: skip

    @property
    def ignored(self) -> list[str]:
        return [f"tools.{self.type}"]


AskedTool = Annotated[
    FunctionTool | CustomTool | NamespaceTool | LocalShellTool | HostedTool, Field(discriminator="type")
]


class NamedToolChoice(Body):
    """The tool that an answer has to call. namespace: of the tool, where its name alone is not enough."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTool(Body):
    """A tool of the request by its name; of a namespace all of its tools. Other kinds are known by their type."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedToolsChoice(Body):
    """The tools that an answer may call (auto) or has to call (required). The prompt shows the others too."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1, max_length=512)


ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedToolChoice | AllowedToolsChoice, Field(discriminator="type")]
)

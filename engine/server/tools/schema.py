"""Tools and calls as OpenAI's clients write them."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from engine.server.body import Body, Ignored, SentBack
from engine.server.tools.arguments import read_arguments

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class AskedFunction(Body):
    """A function that an answer may call. parameters: JSON schema of an object; none: it takes none. strict: whether a
    schema that a grammar cannot follow as a whole is refused.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _is_of_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "object") != "object":
            raise ValueError('should be the schema of an object: {"type": "object", "properties": {...}}')
        return value


class AskedTool(Body):
    """A tool: a function."""

    type: Literal["function"]
    function: AskedFunction
    cache_control: Ignored = False

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """The tool that an answer has to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedNames(Body):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=512)


class AllowedTools(Body):
    """The tools that an answer may call, or has to call one of. The prompt shows the others too."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


AskedToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]


class CalledFunction(Body):
    """The function of an earlier call. arguments: the text of a JSON object; empty: none. It may be any text: an answer
    may have been cut off within it, and a refusal would come back with every later turn.
    """

    name: ToolName
    arguments: str
    parsed_arguments: SentBack = False

    @cached_property
    def read(self) -> dict[str, Any] | None:
        """The arguments as an object, None if the text spells none."""
        return read_arguments(self.arguments)

    @property
    def ignored(self) -> list[str]:
        return [*super().ignored, *(["arguments"] if self.read is None else [])]


class AskedCall(Body):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: SentBack = False
    cache_control: Ignored = False
    provider_specific_fields: Ignored = False

    def plain(self) -> dict[str, Any]:
        """Return the call as chat templates take it: arguments that are no object are an empty one."""
        function = {"name": self.function.name, "arguments": self.function.read or {}}
        return {"id": self.id, "type": "function", "function": function}

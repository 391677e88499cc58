"""The functions that the model sees in place of a response's tools, and how their calls come back.

A tool of a namespace becomes `namespace__tool`, one that takes a text a function with one argument, the client's shell
a function that takes a command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.core.errors import RequestError
from engine.core.grammar import Grammar
from engine.sampling.matcher import check
from engine.server.responses.lark import pattern_of
from engine.server.responses.tools import (
    AllowedTool,
    AskedTool,
    CustomTool,
    FunctionTool,
    GrammarText,
    LocalShellTool,
    NamedToolChoice,
    NamespaceTool,
)
from engine.server.tools.arguments import read_arguments

SHELL = "local_shell"
INPUT = "input"  # the argument of a tool that takes a text
_SHELL_FUNCTION = {
    "name": SHELL,
    "description": "Runs a command in the user's shell and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
_BEGINNING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\(?:["\\/bfnrt]|u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?!\\u|\\?\Z))))*"
)
"""Whole characters of a JSON text. Half of a surrogate pair waits for the other half."""


@dataclass(frozen=True)
class ShownTool:
    """A tool of the request and the function that the model sees. kind: "function", "custom" or "local_shell". path:
    what the client calls the schema of its arguments. free: it has a grammar to which the grammar's library cannot hold
    its text.
    """

    kind: str
    name: str
    function: dict[str, Any]
    path: str
    namespace: str | None = None
    free: bool = False

    def is_named(self, choice: NamedToolChoice | AllowedTool) -> bool:
        """Return whether a client's choice means this tool."""
        if choice.type == "namespace":
            return self.namespace is not None and self.namespace == choice.name
        if choice.type == SHELL:
            return self.kind == SHELL
        full = choice.name == self.function["name"]
        return choice.type == self.kind and (
            full or (choice.name == self.name and choice.namespace in (None, self.namespace))
        )


def shown_tools(tools: Sequence[AskedTool], added: Sequence[AskedTool] = ()) -> list[ShownTool]:
    """Return what the model sees, without the tools that this server has not. added: by a conversation, in which a
    later tool takes the place of an earlier one of its name. Takes milliseconds for each grammar.
    """
    own = list(_each(tools, "tools"))
    if not added:
        return own
    return list({tool.function["name"]: tool for tool in (*own, *_each(added, "input.tools"))}.values())


def _each(tools: Sequence[AskedTool], field: str) -> Iterator[ShownTool]:
    for number, tool in enumerate(tools):
        path = f"{field}[{number}]"
        if isinstance(tool, NamespaceTool):
            about = tool.description
            for place, one in enumerate(tool.tools):  # the common description stands with the first tool
                yield _shown(one, f"{path}.tools[{place}]", tool.name, about)
                about = None
        elif isinstance(tool, LocalShellTool):
            yield ShownTool(SHELL, SHELL, _SHELL_FUNCTION, path)
        elif isinstance(tool, FunctionTool | CustomTool):
            yield _shown(tool, path)


def flat(name: str, namespace: str | None) -> str:
    """Return the name of a tool as the model knows it."""
    return name if namespace is None else f"{namespace}__{name}"


def _shown(
    tool: FunctionTool | CustomTool, path: str, namespace: str | None = None, about: str | None = None
) -> ShownTool:
    if isinstance(tool, FunctionTool):
        function, field, free = _function(tool), "parameters", False
    else:
        function, field = _one_text(tool), "format"
        free = isinstance(tool.format, GrammarText) and "pattern" not in function["parameters"]["properties"][INPUT]
    said = [text for text in (about, function["description"]) if text]
    function |= {"name": flat(tool.name, namespace), "description": "\n".join(said)}
    return ShownTool(tool.type, tool.name, function, f"{path}.{field}", namespace, free)


def _function(tool: FunctionTool) -> dict[str, Any]:
    return tool.model_dump(include={"description", "parameters", "strict"})


def _one_text(tool: CustomTool) -> dict[str, Any]:
    """Return a function whose one argument is the tool's text. A grammar that cannot be forced is described."""
    text, about = {"type": "string"}, tool.description
    if isinstance(grammar := tool.format, GrammarText):
        if (pattern := _pattern(grammar.syntax, grammar.definition)) is not None:
            text["pattern"] = pattern
        else:
            about = f"{about or ''}\nThe input follows this grammar:\n{grammar.definition}".lstrip()
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {"description": about, "parameters": schema}


@lru_cache(maxsize=64)
def _pattern(syntax: str, definition: str) -> str | None:
    """Return the regular expression of a grammar's texts, None if it has none that the grammar's library takes."""
    found = definition if syntax == "regex" else pattern_of(definition)
    if found is None:
        return None
    pattern = f"^(?:{found})$"
    try:
        check(Grammar(json_schema={"type": "string", "pattern": pattern}).validate())
    except RequestError:
        return None
    return pattern


def arguments_of(text: str) -> str:
    """Return the arguments of a call that hands a tool its one text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputReader:
    """Reads the text of a tool out of a call's arguments as they arrive."""

    def __init__(self) -> None:
        self._held, self._begun = "", False

    def feed(self, arguments: str) -> str:
        """Return what the text grows by; half an escape waits for its rest."""
        self._held += arguments
        if not self._begun:
            if (found := _BEGINNING.match(self._held)) is None:
                return ""
            self._held, self._begun = self._held[found.end() :], True
        found = _CHARACTERS.match(self._held)
        assert found is not None
        self._held = self._held[found.end() :]
        text: str = json.loads(f'"{found[0]}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shell_action(arguments: str) -> dict[str, Any]:
    """Return the action of a call of the client's shell; no command where that was cut off or cannot be read."""
    usual: dict[str, Any] = {"type": "exec", "command": [], "env": {}, "timeout_ms": None, "user": None}
    usual["working_directory"] = None
    return {**usual, **(read_arguments(arguments) or {})}

"""What an answer may call, from a request: its grammar, and how it is taken apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.core.errors import RequestError
from engine.core.grammar import JSON_WHITESPACE, Grammar
from engine.sampling.matcher import check, without_annotations
from engine.server.errors import ApiError, field_of
from engine.server.schema import ChatRequest, JsonObjectFormat, JsonSchemaFormat
from engine.server.tools.schema import AskedTool, NamedTool
from engine.text.answer_format import AnswerFormat
from engine.text.answer_reader import AnswerReader
from engine.text.tool_grammar import Tool, Wanted, tool_grammar


@dataclass(frozen=True)
class Calling:
    """format: of the model. shown: tools as its chat template takes them. tools: that may be called. wanted: what the
    answer may be.
    """

    format: AnswerFormat
    shown: Sequence[dict[str, Any]]
    wanted: Wanted

    @classmethod
    def of(cls, body: ChatRequest, format_: AnswerFormat) -> Calling:
        """Raises ApiError or RequestError for tools that the model, or the grammar's library, cannot take."""
        choice = body.tool_choice or "auto"
        if body.tools is None or choice == "none":
            return cls(format_, [], Wanted(answer=_answer(body)))
        shown = shown_to(format_, body.tools)
        callable_ = body.callable_tools
        tools = tuple(
            Tool(tool.function.name, json.loads(without_annotations(json.dumps(tool.function.parameters or {}))))
            for tool in body.tools
            if tool.function.name in callable_
        )
        wanted = Wanted(
            tools=tools,
            calls="required" if body.must_call else "auto",
            many=body.parallel_tool_calls and not isinstance(choice, NamedTool),
            answer=_answer(body),
        )
        return cls(format_, shown, wanted)

    def after(self, prompt: str) -> Calling:
        """The same, after the end of a prompt: it may begin reasoning."""
        reasoning = self.format.reasoning
        thinking = reasoning is not None and prompt.rstrip().endswith(reasoning.begin.rstrip())
        return replace(self, wanted=replace(self.wanted, thinking=thinking))

    @property
    def needs_grammar(self) -> bool:
        """Whether calls or reasoning are part of the answer's grammar."""
        return self.wanted.calls != "none" or (self.wanted.thinking and self.wanted.answer is not None)

    def grammar(self) -> dict[str, str]:
        """The answer's grammar, as `SamplingParams` takes it. Takes milliseconds. Raises ApiError naming the tool whose
        schema the library refuses.
        """
        text = tool_grammar(self.format, self.wanted)
        try:
            check(Grammar(grammar=text).validate())
        except RequestError:
            for number, tool in enumerate(self.wanted.tools):
                _check(tool, number, self.shown)
            raise
        return {"grammar": text}

    @property
    def marks(self) -> frozenset[int]:
        """The special tokens that are part of the text that `reader` reads."""
        return self.format.marks(calls=bool(self.wanted.tools))

    def reasoning_tokens(self, tokens: Sequence[int], thinking: bool) -> int:
        """How many of an answer's tokens are reasoning, where its marks are tokens. thinking: it begins within it."""
        reasoning, added = self.format.reasoning, self.format.added
        if reasoning is None or not (thinking or added.get(reasoning.begin) in tokens):
            return 0
        end = added.get(reasoning.end)
        return tokens.index(end) + 1 if end in tokens else len(tokens)

    def reader(self, thinking: bool) -> AnswerReader:
        """For one answer. thinking: it begins within reasoning."""
        return AnswerReader(self.format, self.wanted.tools, thinking)


def shown_to(format_: AnswerFormat, tools: Sequence[AskedTool]) -> list[dict[str, Any]]:
    """The tools as a model's chat template takes them. Raises ApiError if it takes none."""
    if format_.tools is None:
        raise ApiError(
            400,
            "tools: this model's chat template takes none, or writes calls in no known format; if it does, name "
            "the format with --tool-format",
            code="unsupported",
            param="tools",
        )
    return [tool.plain() for tool in tools]


def _check(tool: Tool, number: int, shown: Sequence[dict[str, Any]]) -> None:
    try:
        check(Grammar(json_schema=tool.closed_schema).validate())
    except RequestError as error:
        place = next((at for at, one in enumerate(shown) if one["function"]["name"] == tool.name), number)
        field = f"tools[{place}].function.parameters"
        message = str(error)
        reason = message[len(field_of(message)) :] or f": {message}"
        raise ApiError(400, field + reason, param=field) from None


def _answer(body: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema of an answer that calls nothing, if it is to follow one."""
    format_ = body.response_format
    style = {"x-guidance": JSON_WHITESPACE}
    if isinstance(format_, JsonSchemaFormat):
        schema: dict[str, Any] = json.loads(without_annotations(json.dumps(format_.json_schema.schema_)))
        return schema | style
    return {"type": "object"} | style if isinstance(format_, JsonObjectFormat) else None

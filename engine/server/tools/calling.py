"""What an answer may call, from a request: its grammar, and how it is taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core.errors import RequestError
from engine.core.grammar import JSON_WHITESPACE, Grammar
from engine.sampling.matcher import check
from engine.server.errors import ApiError, field_of
from engine.server.schema import ChatRequest, JsonObjectFormat, JsonSchemaFormat
from engine.server.tools.arguments import read_json
from engine.server.tools.asked_schema import AskedSchema
from engine.server.tools.message import ChatAnswer
from engine.server.tools.schema import AskedTool, NamedTool
from engine.text.answer_format import AnswerFormat
from engine.text.answer_reader import AnswerReader
from engine.text.tool_grammar import Tool, Wanted, tool_grammar

_STYLE = {"x-guidance": JSON_WHITESPACE}


@dataclass(frozen=True)
class ClientNames:
    """What the client calls the parts of its request. tools: the schema of each tool, in their order in the chat
    request; None: as a chat request does. answer: the answer's schema. fields: those of a chat request that its API
    calls otherwise.
    """

    tools: Sequence[str] | None = None
    answer: str = "response_format.json_schema.schema"
    fields: Mapping[str, str] = field(default_factory=dict)

    def of_tool(self, number: int) -> str:
        return f"tools[{number}].function.parameters" if self.tools is None else self.tools[number]


@dataclass(frozen=True)
class Calling:
    """What the answers of one request may call.

    format: of the model. shown: tools as its chat template takes them. wanted: what the answer may be. schemas: of the
    tools that may be called, by their names. answer: the schema of an answer that calls nothing, if there is one.
    """

    format: AnswerFormat
    shown: Sequence[dict[str, Any]]
    wanted: Wanted
    schemas: Mapping[str, AskedSchema] = field(default_factory=dict)
    answer: AskedSchema | None = None

    @classmethod
    def of(cls, body: ChatRequest, format_: AnswerFormat, names: ClientNames | None = None) -> Calling:
        """Read a request. Takes milliseconds. Raises ApiError for tools that the model cannot take."""
        names = names or ClientNames()
        choice = body.tool_choice or "auto"
        answer, wanted = _answer(body, names)
        if body.tools is None or choice == "none":
            return cls(format_, [], Wanted(answer=wanted), answer=answer)
        schemas = {
            tool.function.name: AskedSchema.of(
                names.of_tool(number), tool.function.parameters or {}, tool.function.strict
            )
            for number, tool in enumerate(body.tools)
            if tool.function.name in body.callable_tools
        }
        may = Wanted(
            tools=tuple(Tool(name, schema.followed) for name, schema in schemas.items()),
            calls="required" if body.must_call else "auto",
            many=body.parallel_tool_calls and not isinstance(choice, NamedTool),
            answer=wanted,
        )
        return cls(format_, shown_to(format_, body.tools), may, schemas, answer)

    @property
    def left_out(self) -> list[str]:
        """The keywords of the client's schemas that the grammar does not follow."""
        return [path for schema in self._asked for path in schema.left_out]

    @property
    def noted(self) -> list[str]:
        """The keywords as the log may hold them, without the client's names."""
        return [keyword for schema in self._asked for keyword in schema.noted]

    @property
    def _asked(self) -> list[AskedSchema]:
        return [*self.schemas.values(), *([] if self.answer is None else [self.answer])]

    def differences(self, text: str, thinking: bool) -> list[str]:
        """Return the keywords of the client's schemas that a finished answer does not follow. thinking: it begins
        within reasoning.
        """
        message = ChatAnswer(self.reader(thinking), self.format).whole(text)
        calls = [call["function"] for call in message.calls]
        finished = [(self.schemas[call["name"]], call["arguments"]) for call in calls if call["name"] in self.schemas]
        if self.answer is not None and not calls:
            finished = [(self.answer, message.content)]
        return [path for schema, value in finished for path in _differences(schema, value)]

    def after(self, prompt: str) -> Calling:
        """Return the same, after the end of a prompt: it may begin reasoning."""
        reasoning = self.format.reasoning
        thinking = reasoning is not None and prompt.rstrip().endswith(reasoning.begin.rstrip())
        return replace(self, wanted=replace(self.wanted, thinking=thinking))

    @property
    def needs_grammar(self) -> bool:
        """Whether calls or reasoning are part of the answer's grammar."""
        return self.wanted.calls != "none" or (self.wanted.thinking and self.wanted.answer is not None)

    def grammar(self) -> dict[str, str]:
        """Return the answer's grammar, as `SamplingParams` takes it. Takes milliseconds. Raises ApiError naming the
        tool whose schema the library refuses.
        """
        text = tool_grammar(self.format, self.wanted)
        try:
            check(Grammar(grammar=text).validate())
        except RequestError:
            for tool in self.wanted.tools:
                _check(tool, self.schemas[tool.name].path)
            raise
        return {"grammar": text}

    @property
    def marks(self) -> frozenset[int]:
        """The special tokens that are part of the text that `reader` reads."""
        return self.format.marks(calls=bool(self.wanted.tools))

    def reasoning_tokens(self, tokens: Sequence[int], thinking: bool) -> int:
        """Return how many of an answer's tokens are reasoning, where its marks are tokens. thinking: it begins within
        it.
        """
        reasoning, added = self.format.reasoning, self.format.added
        if reasoning is None or not (thinking or added.get(reasoning.begin) in tokens):
            return 0
        end = added.get(reasoning.end)
        return tokens.index(end) + 1 if end in tokens else len(tokens)

    def reader(self, thinking: bool) -> AnswerReader:
        """Return a reader for one answer. thinking: it begins within reasoning."""
        return AnswerReader(self.format, self.wanted.tools, thinking)


def shown_to(format_: AnswerFormat, tools: Sequence[AskedTool]) -> list[dict[str, Any]]:
    """Return the tools as a model's chat template takes them. Raises ApiError if it takes none."""
    if format_.tools is None:
        raise ApiError(
            400,
            "tools: this model's chat template takes none, or writes calls in no known format; if it does, name "
            "the format with --tool-format",
            code="unsupported",
            param="tools",
        )
    return [tool.plain() for tool in tools]


def _check(tool: Tool, path: str) -> None:
    try:
        check(Grammar(json_schema=tool.closed_schema).validate())
    except RequestError as error:
        message = str(error)
        reason = message[len(field_of(message)) :] or f": {message}"
        raise ApiError(400, path + reason, param=path) from None


def _answer(body: ChatRequest, names: ClientNames) -> tuple[AskedSchema | None, dict[str, Any] | None]:
    """Return the schema of an answer that calls nothing, as the client sent it and as a grammar follows it, if the
    answer is to follow one.
    """
    format_ = body.response_format
    if isinstance(format_, JsonSchemaFormat):
        asked = AskedSchema.of(names.answer, format_.json_schema.schema_, format_.json_schema.strict)
        return asked, asked.followed | _STYLE
    return None, {"type": "object"} | _STYLE if isinstance(format_, JsonObjectFormat) else None


def _differences(schema: AskedSchema, text: str) -> list[str]:
    """Return the keywords that a value does not follow; none if it was cut off, or cannot be read."""
    try:
        value = read_json(text)
    except ValueError:
        return []
    return schema.differences(value)

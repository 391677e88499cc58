"""How models write what is not plain text in an answer: calls of tools, and reasoning. All of it is data, found by what
a chat template contains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from engine.core.errors import ConfigError
from engine.text.token_pieces import special_tokens

Style = Literal["json", "parameters", "gemma", "python"]
BLANKS = r"[ \t\r\n]*"
"""Regular expression of what may stand before a call with which an answer begins."""


@dataclass(frozen=True)
class Recipient:
    """Another form of a call: a message to the tool. It is `begin`, the tool's name, one of `middles` and the
    arguments, at the beginning of an answer or after the `header` of a message.
    """

    header: str
    begin: str
    middles: tuple[str, ...]


class ParameterMarks(NamedTuple):
    """What stands before a parameter's name, between it and its value, and after the value."""

    opens: str
    middle: str
    closes: str


NO_PARAMETERS = ParameterMarks("", "", "")


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: `opens`, then calls with `between` between them, then `closes`. A call is `begin`, the
    tool's name, `middle`, its arguments, `end`.

    marks: texts that a chat template of this format contains, all of them. unlike: texts that no such template
    contains, of formats that look alike. trigger: the beginning of `opens` + `begin` after which an answer is a call.
    leading: calls come at the beginning of an answer only. single: an answer is one call at most. arguments: how they
    are written: a JSON object, parameters between `parameter`, Gemma's object with its texts between two `quote`, or
    Python's NAME=VALUE.
    skipped: control texts between the parts of an answer that are not part of its text. id_length: of a call's id,
    where the template wants one. bare: some models of this format leave out what calls are written between, so an
    answer that begins with the JSON of a call is one. recipient: a call's other form, if it has one.
    """

    name: str
    marks: tuple[str, ...]
    trigger: str
    begin: str
    middle: str
    end: str
    unlike: tuple[str, ...] = ()
    opens: str = ""
    closes: str = ""
    between: str = "\n"
    arguments: Style = "json"
    parameter: ParameterMarks = NO_PARAMETERS
    quote: str = ""
    leading: bool = False
    single: bool = False
    skipped: tuple[str, ...] = ()
    id_length: int | None = None
    bare: bool = False
    recipient: Recipient | None = None

    @property
    def rest(self) -> str:
        """The text from the trigger to the first tool's name."""
        return (self.opens + self.begin).removeprefix(self.trigger)


@dataclass(frozen=True)
class ReasoningFormat:
    """How reasoning is written: between `begin` and `end`. marks: as of a ToolFormat."""

    marks: tuple[str, ...]
    begin: str
    end: str


_HERMES: dict[str, Any] = {"trigger": "<tool_call>", "begin": '<tool_call>\n{"name": "', "middle": '", "arguments": '}
_LISTED: dict[str, Any] = {
    "begin": '{"name": "',
    "middle": '", "arguments": ',
    "end": "}",
    "closes": "]",
    "between": ", ",
}
_DEEPSEEK: dict[str, Any] = {
    "trigger": "<｜tool▁calls▁begin｜>",
    "opens": "<｜tool▁calls▁begin｜>",
    "closes": "<｜tool▁calls▁end｜>",
}
_ARG_KEYS: dict[str, Any] = {"trigger": "<tool_call>", "arguments": "parameters"}
_HARMONY_HEADER = "<|start|>assistant"
_HARMONY = (
    _HARMONY_HEADER,
    "<|channel|>final <|constrain|>json<|message|>",
    "<|channel|>final<|message|>",
    "<|channel|>commentary<|message|>",
    "<|end|>",
)

TOOL_FORMATS = (  # the first whose marks a template contains is taken
    ToolFormat(
        "harmony",
        marks=("<|channel|>", "functions."),  # its templates write the name apart
        trigger="<|channel|>commentary to=functions.",
        begin="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        end="",
        single=True,  # <|call|> ends the answer
        skipped=_HARMONY,
        recipient=Recipient(
            _HARMONY_HEADER,
            " to=functions.",
            ("<|channel|>commentary <|constrain|>json<|message|>", "<|channel|>commentary json<|message|>"),
        ),
    ),
    ToolFormat(
        "qwen3-coder",
        marks=("<tool_call>", "<function=", "<parameter="),
        trigger="<tool_call>",
        begin="<tool_call>\n<function=",
        middle=">",
        end="\n</function>\n</tool_call>",
        arguments="parameters",
        parameter=ParameterMarks("\n<parameter=", ">\n", "\n</parameter>"),
    ),
    ToolFormat(
        "seed-oss",
        marks=("<seed:tool_call>", "<function=", "<parameter="),
        trigger="<seed:tool_call>",
        begin="<seed:tool_call>\n<function=",
        middle=">",
        end="\n</function>\n</seed:tool_call>",
        arguments="parameters",
        parameter=ParameterMarks("\n<parameter=", ">", "</parameter>"),
    ),
    ToolFormat(
        "glm-compact",
        marks=("<tool_call>", "</arg_key><arg_value>"),
        begin="<tool_call>",
        middle="",
        end="</tool_call>",
        between="",
        parameter=ParameterMarks("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        **_ARG_KEYS,
    ),
    ToolFormat(
        "glm",
        marks=("<tool_call>", "<arg_key>"),
        begin="<tool_call>",
        middle="",
        end="\n</tool_call>",
        parameter=ParameterMarks("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
        **_ARG_KEYS,
    ),
    ToolFormat(
        "deepseek-v3",
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        **_DEEPSEEK,
    ),
    ToolFormat(
        "deepseek",
        marks=("<｜tool▁calls▁begin｜>",),
        begin="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        between="",
        **_DEEPSEEK,
    ),
    ToolFormat(
        "mistral-args",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        unlike=("[CALL_ID]",),
        trigger="[TOOL_CALLS]",
        begin="[TOOL_CALLS]",
        middle="[ARGS]",
        end="",
        between="",
        id_length=9,
    ),
    ToolFormat(
        "mistral-v3", marks=("[TOOL_CALLS] [",), trigger="[TOOL_CALLS]", opens="[TOOL_CALLS] [", id_length=9, **_LISTED
    ),
    ToolFormat(
        "mistral",
        marks=("[TOOL_CALLS]",),
        unlike=("[ARGS]",),
        trigger="[TOOL_CALLS]",
        opens="[TOOL_CALLS][",
        id_length=9,
        **_LISTED,
    ),
    ToolFormat(
        "gemma4",
        marks=("<|tool_call>call:",),
        trigger="<|tool_call>",
        begin="<|tool_call>call:",
        middle="",
        end="<tool_call|>",
        between="",
        arguments="gemma",
        quote='<|"|>',
    ),
    ToolFormat(
        "gemma",
        marks=("<start_function_call>",),
        trigger="<start_function_call>",
        begin="<start_function_call>call:",
        middle="",
        end="<end_function_call>",
        between="",
        arguments="gemma",
        quote="<escape>",
    ),
    ToolFormat("granite", marks=("<|tool_call|>",), trigger="<|tool_call|>", opens="<|tool_call|>[", **_LISTED),
    ToolFormat(
        "toolcall",
        marks=("<TOOLCALL>[",),
        trigger="<TOOLCALL>",
        opens="<TOOLCALL>[",
        **_LISTED | {"closes": "]</TOOLCALL>"},
    ),
    ToolFormat(
        "apertus",
        marks=("<|tools_prefix|>",),
        trigger="<|tools_prefix|>",
        opens="<|tools_prefix|>[",
        begin='{"',
        middle='": ',
        end="}",
        closes="]<|tools_suffix|>",
        between=", ",
    ),
    ToolFormat(
        "lfm2",
        marks=("<|tool_call_start|>",),
        trigger="<|tool_call_start|>",
        opens="<|tool_call_start|>[",
        begin="",
        middle="(",
        end=")",
        closes="]<|tool_call_end|>",
        between=", ",
        arguments="python",
    ),
    ToolFormat(
        "hermes",
        marks=("<tool_call>",),
        unlike=("<arg_key>", "<tool_calls>", "minimax"),
        end="}\n</tool_call>",
        bare=True,
        **_HERMES,
    ),
    ToolFormat(
        "llama",
        marks=('{"name": function name, "parameters": ',),
        trigger='{"name": "',
        begin='{"name": "',
        middle='", "parameters": ',
        end="}",
        leading=True,
        single=True,  # the template refuses messages with more calls
    ),
)
REASONING_FORMATS = (
    ReasoningFormat(("<|channel|>analysis",), "<|channel|>analysis<|message|>", "<|end|>"),
    ReasoningFormat(("<|channel>",), "<|channel>thought\n", "<channel|>"),
    ReasoningFormat(("[THINK]",), "[THINK]", "[/THINK]"),
    ReasoningFormat(("<think>",), "<think>", "</think>"),
    ReasoningFormat(("<seed:think>",), "<seed:think>", "</seed:think>"),
    ReasoningFormat(("<|inner_prefix|>",), "<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ReasoningFormat(("<|START_THINKING|>",), "<|START_THINKING|>", "<|END_THINKING|>"),  # Command R7B and A
    ReasoningFormat(
        ("Here is my thought process:",), "Here is my thought process:", "Here is my response:"
    ),  # Granite 3.2
)


@dataclass(frozen=True)
class AnswerFormat:
    """How a model's answers are written. tools: None where its chat template takes none; what calls are written with
    may be in the template, or among the tokenizer's added tokens alone. added: the texts of the
    tokenizer's added tokens, with their ids. special: the ids of its special tokens, which are added tokens too.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    added: dict[str, int]
    special: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Any, name: str | None = None) -> AnswerFormat:
        """Find the format of a tokenizer's chat template. name: of a tool format, instead of that found. Raises
        ConfigError if there is no such name.
        """
        template = _text_of(tokenizer.chat_template)
        named = {one.name: one for one in TOOL_FORMATS}
        if name is not None and name not in named:
            raise ConfigError(f"--tool-format {name}: is no format; there are {', '.join(sorted(named))}")
        added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        special = frozenset(special_tokens(tokenizer))
        tools = named[name] if name is not None else _tools_of(template) or _tools_of("\n".join([template, *added]))
        return cls(tools if "tools" in template else None, _reasoning_of(template), added, special)

    @property
    def unread(self) -> frozenset[int]:
        """The control tokens that an answer's text leaves out where it may call."""
        return self.special - self.marks(calls=True)

    def marks(self, calls: bool) -> frozenset[int]:
        """Return the added tokens that reasoning, and with `calls` the calls, are written with."""
        texts = list(self.tools.skipped) if self.tools is not None else []
        if self.reasoning is not None:
            texts += [self.reasoning.begin, self.reasoning.end]
        if calls and (one := self.tools) is not None:
            texts += [one.opens, one.begin, one.middle, one.end, one.between, one.closes, one.quote, *one.parameter]
            texts += one.recipient.middles if one.recipient is not None else ()
        return frozenset(number for mark, number in self.added.items() if any(mark in text for text in texts))


@dataclass(frozen=True)
class BareForm:
    """How a call is written without its marks. lead: regular expression of what comes before the arguments of the tool
    NAME. end: of what follows them. indented: whether the JSON may be indented, and be in a fence, which one call opens
    and the same or a later one closes.
    """

    lead: str
    end: str
    indented: bool


BARE_FORMS = (
    BareForm(r'\{\{?"name": "NAME", "arguments": ', r"\}\}?", False),  # Qwen2.5-Coder's template doubles the braces
    BareForm(r'(```(json)?\n\{[ \n]*|\{[ \n]+)"name": "NAME",[ \n]*"arguments": ', r"[ \n]*\}", True),
    BareForm(r'(```(json)?\n)?\{"name":"NAME","arguments":', r"\}", True),  # as compact as JSON can be
)


def _tools_of(template: str) -> ToolFormat | None:
    def fits(one: ToolFormat) -> bool:
        return all(mark in template for mark in one.marks) and not any(mark in template for mark in one.unlike)

    return next(filter(fits, TOOL_FORMATS), None)


def _reasoning_of(template: str) -> ReasoningFormat | None:
    return next((one for one in REASONING_FORMATS if all(mark in template for mark in one.marks)), None)


def _text_of(template: Any) -> str:
    """Return a chat template's text; a tokenizer may have several, of which one is for tools."""
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""

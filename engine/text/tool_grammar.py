"""Writes the grammar of an answer that may call tools or reason, in llguidance's variant of Lark.

Where a call begins, the grammar holds to its end: the name is a tool's, and the arguments follow its schema. JSON has
one style, that of `json.dumps`, so all but the values is forced, and what is forced is drafted at no cost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.errors import RequestError
from engine.core.grammar import JSON_WHITESPACE, ONE_STYLE
from engine.text.answer_format import BARE_FORMS, BLANKS, AnswerFormat, ReasoningFormat, ToolFormat
from engine.text.argument_rules import GemmaRules, ParameterRules, PythonRules

MOST_CALLS = 64  # calls in one answer: a small model may repeat itself
MOST_BEHIND = 16  # characters after the last call of an answer
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "unevaluatedProperties", "propertyNames")
_ANY = r"/(.|\n)*/"
_SOME = r"/(.|\n)+/"


@dataclass(frozen=True)
class Tool:
    """A tool that may be called. schema: JSON schema of its arguments, which are an object."""

    name: str
    schema: dict[str, Any]

    @property
    def closed_schema(self) -> dict[str, Any]:
        """The schema; where it names some arguments and does not speak of others, it allows no others."""
        plain = self.schema.get("properties") and not any(key in self.schema for key in _COMBINED)
        closed = {"additionalProperties": False} if plain or not self.schema else {}
        return {"type": "object", **closed, **self.schema}


@dataclass(frozen=True)
class Wanted:
    """What an answer may be. calls: "none", "auto" (text or calls) or "required". many: more than one call. thinking:
    the prompt ends within reasoning. answer: JSON schema of an answer that calls nothing, None for any text.
    """

    tools: Sequence[Tool] = ()
    calls: str = "none"
    many: bool = True
    thinking: bool = False
    answer: dict[str, Any] | None = None


def tool_grammar(format_: AnswerFormat, wanted: Wanted) -> str:
    """Return the grammar's text. Raises RequestError for a schema that is nested too deeply."""
    try:
        return _Writer(format_).grammar(wanted)
    except RecursionError:
        raise RequestError("tools: a schema is nested too deeply; use $ref") from None


class _Writer:
    """Writes the rules of a grammar. rules: those written so far."""

    def __init__(self, format_: AnswerFormat):
        self.format, self.rules = format_, [f"OTHER: {_SOME}"]
        self._added = re.compile("|".join(map(re.escape, sorted(format_.added, key=len, reverse=True))) or r"(?!)")

    def grammar(self, wanted: Wanted) -> str:
        tools, ways = self.format.tools, []
        reasoning = self._reasoning(wanted.thinking)
        leads = wanted.calls == "required" or wanted.answer is not None
        self._write_lead()
        if wanted.calls != "none" and tools is not None:
            self._calls(tools, wanted)
            ways.append(self._literal(tools.trigger) + " calls" if leads else self._opened(tools) + " calls")
            if tools.bare and not leads:
                ways.append(f"lead {self._bare_calls(tools, wanted)}")
        if wanted.calls != "required":
            ways.append(self._answer(tools, wanted))
        if tools is not None and tools.skipped:
            skips = " | ".join(f"({self._literal(text)})" for text in tools.skipped)
            self.rules.append(f"skipped: ({skips}){{0,3}}")
            skipped = "skipped" if leads else "lead skipped"
            ways = [f"{skipped} {way}" for way in ways]
            if wanted.calls != "none" and tools.recipient is not None:
                before = skipped if leads else f"{skipped} (OTHER skipped)?"
                header = f"({before} {self._literal(tools.recipient.header)})?"
                ways.append(f"{'' if leads else 'lead'} {header} {self._call_to(tools, wanted)}")
        self.rules.append(f"start: {reasoning} ({' | '.join(ways)})")
        return "\n".join(["%llguidance {}", *reversed(self.rules)])

    def _reasoning(self, thinking: bool) -> str:
        """Return an expression for what comes before the answer: reasoning that the prompt has begun, or that the
        answer may begin.
        """
        reasoning = self.format.reasoning
        if reasoning is None:
            return ""
        self.rules.append("BLANK: /[ \\n]{0,8}/")
        if thinking:
            self._until(reasoning, "thought")
            return "thought BLANK"
        if reasoning.begin in self.format.added or self._leads_with_added(reasoning.begin):
            self._until(reasoning, "thought")
            return f"({self._literal(reasoning.begin)} thought BLANK)?"
        return ""

    def _leads_with_added(self, text: str) -> bool:
        return self._added.match(text) is not None

    def _until(self, reasoning: ReasoningFormat, name: str) -> None:
        """Add a rule for what goes on until reasoning ends, control tokens included."""
        if reasoning.end in self.format.added:
            self.rules.append(f"{name}: {self._free(reasoning.end)} {self._literal(reasoning.end)}")
        else:
            self.rules.append(f"{name}[lazy]: {_ANY} {json.dumps(reasoning.end)}")

    def _opened(self, tools: ToolFormat) -> str:
        """Return an expression for what precedes the first call, its trigger included. The text of a trigger that is
        one token may also come in several.
        """
        trigger = tools.trigger
        if tools.leading:
            self.rules.append(f"opened[lazy]: /{BLANKS}{re.escape(trigger)}/")
            return "lead opened"
        ways = []
        if (first := self._added.match(trigger)) is not None:
            free = "(OTHER skipped)?" if tools.skipped else self._free(first[0])
            ways.append(f"{free} {self._literal(trigger)}")
        if first is None or first[0] == trigger:
            self.rules.append(f"spelled[lazy]: {_ANY} {json.dumps(trigger)}")
            others = self._others("" if first is None else trigger)
            ways.append(f"(OTHER? ({others}))* spelled" if others and not tools.skipped else "spelled")
        self.rules.append(f"opened: {' | '.join(ways)}")
        return "opened"

    def _write_lead(self) -> None:
        """Add the rule for what an answer may begin with unread: hidden control tokens, and blanks before each. Blanks
        after them are part of what follows.
        """
        self.rules += [f"GAP: /{BLANKS}/", f"lead: (GAP? {unread})*" if (unread := self._unread()) else 'lead: ""']

    def _answer(self, tools: ToolFormat | None, wanted: Wanted) -> str:
        """Return an expression for an answer that calls nothing."""
        if wanted.answer is not None:
            return f"%json {_dumps(wanted.answer)}"
        if wanted.calls == "auto" and tools is not None and tools.leading:
            self.rules.append(f"OUTRIGHT: /{BLANKS}([^ \\t\\r\\n{re.escape(tools.trigger[0])}](.|\\n)*)?/")
            return "lead OUTRIGHT"
        return self._free(tools.trigger if tools is not None and wanted.calls == "auto" else "")

    def _free(self, without: str) -> str:
        """Return an expression for any text and any of the added tokens, except those with which reasoning or `without`
        begins.
        """
        tools = self.format.tools
        if tools is not None and tools.skipped:  # the tokens of headers begin many things
            return "OTHER?"
        others = self._others(without)
        return f"(OTHER | {others})*" if others else "OTHER?"

    def _others(self, without: str) -> str:
        """Return an expression for any one of the added tokens, except those with which reasoning or `without` begins;
        "" if none is left.

        The library takes a token for one set of tokens alone, so sets are the same wherever they may meet, or disjoint.
        """
        reasoning = self.format.reasoning
        closed = [without] + ([reasoning.begin, reasoning.end] if reasoning is not None else [])
        first = {found[0] for text in closed if (found := self._added.match(text)) is not None}
        others = {number for text, number in self.format.added.items() if text not in first}
        return " | ".join(filter(None, (self._unread(), _any_token(others - self.format.unread))))

    def _unread(self) -> str:
        """Return an expression for a control token that an answer's text leaves out."""
        return _any_token(self.format.unread)

    def _calls(self, tools: ToolFormat, wanted: Wanted) -> None:
        """Add rules for calls, from the trigger's end on."""
        named = [f"call_{number}" for number in range(len(wanted.tools))]
        more, trail = "", ""
        if wanted.many and not tools.single and len(wanted.tools) and MOST_CALLS > 1:
            more = f"({self._literal(tools.between + tools.begin)} call){{0,{MOST_CALLS - 1}}}"
            trail = self._trail(tools)
        self.rules.append(f"calls: {self._literal(tools.rest)} call {more} {self._literal(tools.closes)} {trail}")
        self.rules.append(f"call: {' | '.join(named)}")
        for name, tool in zip(named, wanted.tools, strict=True):
            lead, end = self._literal(tool.name + tools.middle), self._literal(tools.end)
            self.rules.append(f"{name}: {lead} {self._arguments(tools, tool, name)} {end}")

    def _call_to(self, tools: ToolFormat, wanted: Wanted) -> str:
        """Add rules for a call in the form of a message to a tool, and return the first rule's name."""
        assert tools.recipient is not None
        middles = " | ".join(f"({self._literal(middle)})" for middle in tools.recipient.middles)
        ways = []
        for number, tool in enumerate(wanted.tools):
            arguments = self._arguments(tools, tool, f"to_{number}")
            ways.append(f"{self._literal(tool.name)} ({middles}) {arguments} {self._literal(tools.end)}")
        self.rules.append(f"to[lazy]: /{BLANKS}{re.escape(tools.recipient.begin)}/")  # lazy: it is no other text
        return f"to ({' | '.join(ways)})"

    def _bare_calls(self, tools: ToolFormat, wanted: Wanted) -> str:
        """Add rules for calls without their marks, with which an answer begins. The rules hold from the
        arguments on.
        """
        for place, form in enumerate(BARE_FORMS):
            style = {"x-guidance": JSON_WHITESPACE} if form.indented else ONE_STYLE
            for number, tool in enumerate(wanted.tools):
                arguments = f"%json {_dumps(tool.closed_schema | style)}"
                fence = " fence?" if form.indented else ""
                self.rules.append(f"bare_{number}_{place}: {arguments} /{form.end}/{fence}")
        self.rules.append("fence[lazy]: /[ \\n]*```/")
        first = self._bare_call("bare", BLANKS, wanted)
        if not wanted.many:
            return first
        following = self._bare_call("next", r"\n\n?", wanted)
        return f"{first} {following}{{0,{MOST_CALLS - 1}}} {self._trail(tools)}"

    def _bare_call(self, name: str, before: str, wanted: Wanted) -> str:
        """Add a rule for one call. before: regular expression of what comes before it."""
        ways = []
        for place, form in enumerate(BARE_FORMS):
            for number, tool in enumerate(wanted.tools):
                lead = before + form.lead.replace("NAME", re.escape(tool.name))
                self.rules.append(f"{name}_lead_{number}_{place}[lazy]: /{lead}/")
                ways.append(f"{name}_lead_{number}_{place} bare_{number}_{place}")
        self.rules.append(f"{name}: {' | '.join(ways)}")
        return name

    def _trail(self, tools: ToolFormat) -> str:
        """Return an expression for what may follow the last of several calls without being read: a little of any text.
        Without it a line's end, which models write before they end an answer or go on with text, would force another
        call. Where what begins another call is as short as that text, the text does not begin alike.
        """
        following = tools.between + tools.begin
        alike = not tools.closes and tools.between == "\n" and len(following) <= MOST_BEHIND
        second = f"[^{re.escape(following[1])}]" if alike else r"(.|\n)"
        rule = rf"TRAIL: /[ \n]({second}(.|\n){{0,{MOST_BEHIND - 2}}})?/"
        if rule not in self.rules:
            self.rules.append(rule)
        return "TRAIL?"

    def _arguments(self, tools: ToolFormat, tool: Tool, name: str) -> str:
        schema = tool.closed_schema
        if tools.arguments == "json":
            return f"%json {_dumps(schema | ONE_STYLE)}"
        if tools.arguments == "parameters":
            is_token = tools.parameter.closes in self.format.added
            return ParameterRules(self.rules, self._literal, schema, tools.parameter, is_token).arguments(name)
        if tools.arguments == "python":
            return PythonRules(self.rules, self._literal, schema).arguments(name)
        is_token = tools.quote in self.format.added
        return GemmaRules(self.rules, self._literal, schema, tools.quote, is_token).arguments(name)

    def _literal(self, text: str) -> str:
        """Return a text as the model's tokens spell it: added tokens as such."""
        parts, end = [], 0
        for found in self._added.finditer(text):
            parts += [json.dumps(text[end : found.start()]), f"<[{self.format.added[found[0]]}]>"]
            end = found.end()
        return " ".join(part for part in [*parts, json.dumps(text[end:])] if part != '""') or '""'


def _any_token(ids: Collection[int]) -> str:
    """Return an expression for one of the tokens; "" if there is none."""
    return f"<[{','.join(map(str, sorted(ids)))}]>" if ids else ""


def _dumps(schema: dict[str, Any]) -> str:
    return json.dumps(schema)

"""Takes an answer apart as it arrives: its text, its reasoning, and its calls of tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from engine.text.answer_format import BARE_FORMS, BLANKS, AnswerFormat, ToolFormat
from engine.text.argument_schema import ArgumentSchema
from engine.text.call_arguments import ArgumentsReader, GemmaReader, JsonReader, ParametersReader, PythonReader, begun
from engine.text.tool_grammar import Tool

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_BEHIND_BARE = re.compile(r"[}\s`]*(json\n)?")
_FENCES = ("", "{", "```", "```json")


class AnswerPart(NamedTuple):
    """A part of an answer. call: a tool's name, with which a call begins; arguments: JSON of the latest call."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class AnswerReader:
    """Takes an answer's text with `feed`, control tokens of `format_` included; `end` gives what it has held back.

    tools: that may be called; without any, calls are text. thinking: the answer begins within reasoning. A call that is
    cut off, by `max_tokens` or a stop text, ends where it was cut.
    """

    def __init__(self, format_: AnswerFormat, tools: Sequence[Tool] = (), thinking: bool = False):
        self._reasoning = format_.reasoning
        self._tools = format_.tools if tools else None
        self._recipient = self._tools.recipient if self._tools is not None else None
        self._skipped = format_.tools.skipped if format_.tools is not None else ()
        self._named = {tool.name: tool for tool in tools}
        names = "|".join(re.escape(tool.name) for tool in tools)
        bare = tools and format_.tools is not None and format_.tools.bare
        self._bare = [
            (form, re.compile(form.lead.replace("NAME", f"(?P<name>{names})"))) for form in BARE_FORMS if bare
        ]
        self._bare_end: re.Pattern[str] | None = None
        self._middles: Sequence[str] = ()  # texts that may follow the name of the call
        self._held, self._blank = "", ""
        self._arguments: ArgumentsReader | None = None
        self._state: Callable[[], list[AnswerPart] | None] = self._thinks if thinking else self._opens
        self._said, self._thought = False, False  # whether there was text that is not blank, and reasoning
        self.calls = 0

    def feed(self, text: str) -> list[AnswerPart]:
        """Read more text, and return the parts that are certain now."""
        self._held += text
        parts: list[AnswerPart] = []
        while (found := self._state()) is not None:
            parts += found
        return _joined(parts)

    def end(self) -> list[AnswerPart]:
        """Return the rest, after which nothing follows."""
        held, blank, self._held, self._blank = self._held, self._blank, "", ""
        if self._state == self._thinks:
            return [AnswerPart("reasoning", held)] if held else []
        return (
            [AnswerPart("content", blank + held)]
            if blank + held and self._state in (self._talks, self._opens) and not self.calls
            else []
        )

    # Each state reads what it can of the text held, and returns the parts; None when it needs more text.

    def _opens(self) -> list[AnswerPart] | None:
        """Begin a message: whom it is to, if it is to a tool."""
        if self._recipient is not None:
            begin = self._recipient.begin
            if (found := re.match(BLANKS + re.escape(begin), self._held)) is not None:
                self._middles = self._recipient.middles
                return self._expect(found[0], self._names)
            if begin.lstrip()[:-1].startswith(_unblanked(self._held)):
                return None
        self._state = self._talks
        return []

    def _talks(self) -> list[AnswerPart] | None:
        if self._bare and not self._said and (found := self._maybe_bare()) is not True:
            return found
        marks: dict[str, Callable[[], list[AnswerPart] | None] | None] = dict.fromkeys(self._skipped)
        if self._reasoning is not None:
            marks[self._reasoning.begin] = self._thinks
        if self._tools is not None and self._may_call(self._tools):
            marks[self._tools.trigger] = self._begins
        at, mark = _first(self._held, marks)
        if not mark:
            held = max((begun(self._held, one) for one in marks), default=0)
            return self._say(self._held[: len(self._held) - held], held)
        parts = self._say(self._held[:at], len(self._held) - at) or []
        self._held, self._blank = self._held[len(mark) :], ""
        if (state := marks[mark]) is not None:
            self._state, self._said = state, False
        elif self._recipient is not None and mark == self._recipient.header:
            self._state = self._opens
        return parts

    def _may_call(self, tools: ToolFormat) -> bool:
        """Return whether a trigger that follows begins a call: where calls lead, only blanks may be before it."""
        if not tools.leading:
            return True
        held = _unblanked(self._held)
        return not self._said and (held.startswith(tools.trigger) or tools.trigger.startswith(held))

    def _say(self, text: str, held: int) -> list[AnswerPart] | None:
        """Return the text's part. Blanks wait for what follows: where other parts stand beside a text, it does not
        begin or end with them.
        """
        self._held = self._held[len(self._held) - held :] if held else ""
        text = self._blank + text
        shown = text.rstrip() if self._reasoning is not None or self._tools is not None else text
        if self._thought and not self._said:
            shown, text = shown.lstrip(), text.lstrip()
        self._blank = text[len(shown) :]
        self._said = self._said or bool(shown)
        return [AnswerPart("content", shown)] if shown else None

    def _thinks(self) -> list[AnswerPart] | None:
        assert self._reasoning is not None
        self._thought = True
        end = self._reasoning.end
        at = self._held.find(end)
        count = len(self._held) - begun(self._held, end) if at < 0 else at
        thought, self._held = self._held[:count], self._held[count:]
        if at >= 0:
            self._held, self._state = self._held[len(end) :], self._opens
            return [AnswerPart("reasoning", thought)]
        return [AnswerPart("reasoning", thought)] if thought else None

    def _maybe_bare(self) -> list[AnswerPart] | Literal[True] | None:
        """Return the bare call that comes next, None if it may yet become one, True if it is none."""
        held = _unblanked(self._held)
        for form, lead in self._bare:
            if (match := lead.match(held)) is not None:
                self._held, self._arguments, self._bare_end = held[match.end() :], JsonReader(), re.compile(form.end)
                self._state, self.calls = self._argues, self.calls + 1
                return [AnswerPart("call", match["name"])]
        squeezed = "".join(held.split())
        leads = (f'{fence}{{"name":"{name}","arguments":' for fence in _FENCES for name in self._named)
        return None if any(one.startswith(squeezed) for one in leads) else True

    def _ends_bare(self) -> list[AnswerPart] | None:
        assert self._bare_end is not None
        if (end := self._bare_end.match(self._held)) is None:
            return None
        self._held, self._state = self._held[end.end() :], self._follows_bare
        return []

    def _follows_bare(self) -> list[AnswerPart] | None:
        """Read what follows a bare call: another one, on a line of its own, in the same fence or another."""
        behind = _BEHIND_BARE.match(self._held)
        assert behind is not None
        self._held = self._held[behind.end() :]
        return None if (found := self._maybe_bare()) is True else found

    def _begins(self) -> list[AnswerPart] | None:
        assert self._tools is not None
        self._middles = (self._tools.middle,)
        return self._expect(self._tools.rest, self._names)

    def _names(self) -> list[AnswerPart] | None:
        assert self._tools is not None
        found = _NAME.match(self._held)
        assert found is not None
        name = found[0]
        if found.end() == len(self._held) or not name:
            return None
        self._held = self._held[len(name) :]
        self._arguments = self._reader(name)
        self._state, self.calls = self._middle, self.calls + 1
        return [AnswerPart("call", name)]

    def _middle(self) -> list[AnswerPart] | None:
        found = next((middle for middle in self._middles if self._held.startswith(middle)), None)
        return None if found is None else self._expect(found, self._argues)

    def _argues(self) -> list[AnswerPart] | None:
        assert self._arguments is not None
        count, text = self._arguments.feed(self._held)
        self._held = self._held[count:]
        if self._arguments.done:
            self._state = self._ends if self._bare_end is None else self._ends_bare
        elif not count:
            return None
        return [AnswerPart("arguments", text)] if text else []

    def _ends(self) -> list[AnswerPart] | None:
        assert self._tools is not None
        return self._expect(self._tools.end, self._between)

    def _between(self) -> list[AnswerPart] | None:
        """Read what follows a call: another one, or nothing that is shown."""
        assert self._tools is not None
        following = self._tools.between + self._tools.begin
        if not self._held.startswith(following):
            return None
        self._held, self._state = self._held[len(following) :], self._names
        return []

    def _expect(self, text: str, then: Callable[[], list[AnswerPart] | None]) -> list[AnswerPart] | None:
        """Pass over what the grammar forces."""
        if len(self._held) < len(text):
            return None
        self._held, self._state = self._held[len(text) :], then
        return []

    def _reader(self, name: str) -> ArgumentsReader:
        assert self._tools is not None
        if self._tools.arguments == "parameters":
            texts = ArgumentSchema(self._named[name].schema if name in self._named else {}).texts
            return ParametersReader(self._tools.parameter, self._tools.end, texts)
        if self._tools.arguments == "python":
            return PythonReader()
        return GemmaReader(self._tools.quote) if self._tools.arguments == "gemma" else JsonReader()


def _unblanked(text: str) -> str:
    """Return the text without the blanks that it begins with."""
    return re.sub(f"^{BLANKS}", "", text)


def _first(text: str, marks: Mapping[str, object]) -> tuple[int, str]:
    """Return the first mark in the text, the longest of those at one place, and where it is; "" if there is none."""
    found = [(text.find(mark), mark) for mark in marks if mark in text]
    return min(found, key=lambda one: (one[0], -len(one[1])), default=(-1, ""))


def _joined(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """Join neighbouring parts of one kind; a call's name is whole."""
    joined: list[AnswerPart] = []
    for part in parts:
        if joined and joined[-1].kind == part.kind != "call":
            joined[-1] = AnswerPart(part.kind, joined[-1].text + part.text)
        elif part.text or part.kind == "call":
            joined.append(part)
    return joined

"""Chat templates are programs in Jinja that models bring. They run here as `transformers` runs them, without its
import, which takes seconds.

A template is foreign code: it runs in Jinja's sandbox, and sees only copies of plain data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning has; templates read the first, or the second."""
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Follows the text that an answer continues, which shows where the template went on after it."""


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    opens_answer: bool,
    continues: bool,
    variables: Mapping[str, Any],
) -> str:
    """Return the text that the template makes of the messages. opens_answer, continues: see `Rendering`. Raises
    whatever the template does, and ValueError if it does not show the message to continue.
    """
    if not messages:
        raise ValueError("there are no messages")
    if opens_answer and continues:
        raise ValueError("an answer cannot be begun and continued")
    chat = [_named({key: _plain(item) for key, item in one.items() if item is not None}) for one in messages]
    last = _marked(chat, template) if continues else ""
    text = _compiled(template).render(
        messages=chat, tools=_plain(tools), documents=None, add_generation_prompt=opens_answer, **_plain(variables)
    )
    return _up_to_mark(text, last) if continues else text


def _named(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under the names that templates read."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _marked(chat: Sequence[dict[str, Any]], template: str) -> str:
    """Mark the last message, and return its text."""
    content = chat[-1].get("content")
    if content is None or "content" not in template:
        raise ValueError("the last message has no content to continue")
    if isinstance(content, str):
        chat[-1]["content"] = content + _MARK
        return content
    part = next((part for part in reversed(content) if "text" in part), None)
    if part is None:
        raise ValueError("the last message has no text to continue")
    text: str = part["text"]
    part["text"] = text + _MARK
    return text


def _up_to_mark(text: str, last: str) -> str:
    if last.strip() not in text or _MARK.strip() not in text:
        raise ValueError("the template does not show the last message as it is, so that it cannot be continued")
    end = text.rindex(_MARK.strip())
    return text[:end] if text[end : end + len(_MARK)] == _MARK else text[:end].rstrip()  # its space was trimmed


def _plain(value: Any) -> Any:
    """Copy a value so that everything is of JSON's own types: objects have methods that a template could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else [*map(_plain, value)]
    return f"<{type(value).__name__}>"


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_now, dict=_Dictionaries(), namespace=_Namespace)
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as `transformers` does; Jinja's own filter would escape what HTML does not take."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


_TOLD: ContextVar[datetime | None] = ContextVar("_TOLD", default=None)


@contextmanager
def told_the_day(day: datetime) -> Iterator[None]:
    """Let templates that name the day name this one, for prompts that are to be the same tomorrow."""
    before = _TOLD.set(day)
    try:
        yield
    finally:
        _TOLD.reset(before)


def _now(form: str) -> str:
    return (_TOLD.get() or datetime.now()).strftime(form)


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it shows its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller: Any) -> str:
        return str(caller())


class _Dictionaries:
    """`dict`, without the methods by which a template could reach more than the dictionary."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore, which are Python's own."""

    def __init__(*args: Any, **items: Any) -> None:  # positional, so that `self` may be an item
        held = dict(*args[1:], **items)
        for name in held:
            _check_name(name)
        Namespace.__init__(args[0], held)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot store {name!r} in a namespace: rename it")

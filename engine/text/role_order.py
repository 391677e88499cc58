"""Messages in an order of roles that the chat template takes.

Clients send several system messages, later ones too, and two user messages in a row. Some templates refuse these.
Short conversations show what a template refuses, so the change depends on the template and never on the
conversation: what an earlier turn sent is changed in the same way in every later turn and stays in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jinja2.exceptions import TemplateError

from engine.core.errors import RequestError
from engine.text.chat import Rendering, render

Message = Mapping[str, Any]
_SYSTEM, _USER, _ANSWER = ({"role": role, "content": "a"} for role in ("system", "user", "assistant"))
_ID = "a" * 9  # Mistral's templates take no other length
_CALL = {"id": _ID, "type": "function", "function": {"name": "a", "arguments": {}}}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": _ID, "name": "a", "content": "a"}
_BETWEEN = "\n\n"


def render_accepted(tokenizer: Any, messages: Sequence[Any], rendering: Rendering) -> tuple[Sequence[Any], str]:
    """Return the messages and the text that the chat template makes of them. If the template itself refuses them, they
    are put into an order that it takes. Raises RequestError, with the first refusal if that is refused too.
    """
    try:
        return messages, render(tokenizer, messages, rendering)
    except RequestError as refusal:
        if type(refusal.__cause__) is not TemplateError:  # subclasses are faults of the template
            raise
        ordered = _in_order(tokenizer, messages, rendering)
        with suppress(RequestError):
            return ordered, render(tokenizer, ordered, rendering)
        raise


def _in_order(tokenizer: Any, messages: Sequence[Message], rendering: Rendering) -> Sequence[Message]:
    """Return the messages without the orders of roles that the template refuses."""
    plain = replace(rendering, opens_answer=True, continues=False)

    def refused(*short: Message) -> bool:
        try:
            render(tokenizer, short, plain)
        except RequestError:
            return True
        return False

    if refused(_SYSTEM, _USER):
        messages = _said_by_user(messages)
    else:
        lead = next((place for place, one in enumerate(messages) if one["role"] != "system"), len(messages))
        system, rest = messages[:lead], messages[lead:]
        if refused(_SYSTEM, _SYSTEM, _USER):
            system = _joined(system, {"system"})
        messages = [*system, *(_said_by_user(rest) if refused(_USER, _ANSWER, _SYSTEM, _USER) else rest)]
    alternate = {"user", "assistant"} if refused(_USER, _USER) else set()
    return _joined(messages, alternate, refused(_USER, _CALLS, _RESULT, _USER))


def _said_by_user(messages: Sequence[Message]) -> list[Message]:
    """Turn system messages into the user's."""
    return [{**one, "role": "user"} if one["role"] == "system" else one for one in messages]


def _joined(messages: Sequence[Message], roles: set[str], with_results: bool = False) -> list[Message]:
    """Join neighbours of the same role, if it is one of `roles`. with_results: join what the user says after a tool's
    result to that result.
    """
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else {"role": None}
        same = message["role"] == last["role"] and message["role"] in roles and not last.get("tool_calls")
        if same or (with_results and (last["role"], message["role"]) == ("tool", "user")):
            own = {key: value for key, value in last.items() if value}
            joined[-1] = {**message, **own, "content": _content(last["content"], message["content"])}
        else:
            joined.append(message)
    return joined


def _content(first: Any, second: Any) -> Any:
    """Return both contents as one: a text, or parts if one of them has parts such as pictures."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{_BETWEEN}{second}"
    return [*_parts(first), *_parts(_BETWEEN), *_parts(second)]


def _parts(content: Any) -> Sequence[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content

"""Chat templates are run as transformers runs them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from engine.text.template import render_template

TOOLS = [{"type": "function", "function": {"name": "f", "description": 'Z\u00fcrich <b> "q"', "parameters": {"a": 1}}}]
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"city": "Z\u00fcrich", "n": 1.5}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi <b> & 'x' \u00fc"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a  "}],
    [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    [{"role": "user", "content": "u"}, {"role": "assistant", "content": "half", "reasoning": "why"}],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]}],
    [{"role": "user", "content": "a", "odd": object(), "many": (1, [True, None])}],
]
TEMPLATES = {
    "chat": """
{%- for m in messages %}
    {%- if m.content is string %}<|{{ m.role }}|>{{ m.content }}<|end|>
    {% else %}{{ m.content | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    "lines": "{% if true %}\n  a\n  {% endif %}\n{{ messages[0].content }}\n",
    "trimmed": "{% for m in messages %}{{ m.content | trim }}|{% endfor %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}{% endif %}content",
    "json": "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }} {{ documents }} {{ tools is none }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.content }}{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "values": "{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}{{ dict(a=1) }}content",
    "keys": "{{ dict.fromkeys('ab', 2) }}content",
    "variables": "{{ bos_token }}{{ think }}{{ missing is defined }}{{ messages[0].odd }}{{ messages[0].many }}content",
    "date": "{{ strftime_now('%Y-%m-%d') }}content",
    "refuses": "{{ raise_exception('roles must alternate') }}content",
    "calls": "{{ messages[0].content.__class__.__mro__ }}content",
    "changes": "{{ messages.append(1) }}content",
    "dunder": "{% set ns = namespace(__class__=1) %}content",
    "dunder later": "{% set ns = namespace() %}{% set ns._a = 1 %}content",
    "self": "{% set ns = namespace(self=1) %}{{ ns.self }}content",
    "wrong": "{% for %}content",
}  # fmt: skip
VARIABLES = {"bos_token": "<s>", "think": False}


def outcome(render: Any) -> str:
    """The text, or that it was refused, and what the template itself says then."""
    try:
        return str(render())
    except Exception as error:
        return f"refused: {error if type(error) is TemplateError else ''}"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("ends", ["", "add_generation_prompt", "continue_final_message"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_the_text_is_that_of_transformers(name: str, ends: str, tools: Any) -> None:
    opens, goes_on = ends == "add_generation_prompt", ends == "continue_final_message"
    for chat in CHATS:
        given = [{key: value for key, value in message.items() if value is not None} for message in chat]

        def theirs(given: Any = given) -> str:
            options: dict[str, Any] = {"chat_template": TEMPLATES[name], "tools": tools} | (
                {ends: True} if ends else {}
            )
            rendered, _ = render_jinja_template(conversations=[given], **options, **VARIABLES)
            return str(rendered[0])

        def ours(chat: Any = chat) -> str:
            return render_template(TEMPLATES[name], chat, tools, opens, goes_on, VARIABLES)

        assert outcome(ours) == outcome(theirs)


def test_the_callers_messages_stay_as_they_are() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    assert render_template("{{ messages[0].content[0].text }}content", chat, None, False, True, {}) == "one"
    assert chat == [{"role": "user", "content": [{"type": "text", "text": "one"}]}]


@pytest.mark.parametrize(
    ("messages", "opens", "reason"),
    [([], False, "there are no messages"), ([{"role": "user", "content": "a"}], True, "begun and continued")],
)
def test_what_is_no_chat_is_refused(messages: Any, opens: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        render_template(TEMPLATES["chat"], messages, None, opens, True, {})

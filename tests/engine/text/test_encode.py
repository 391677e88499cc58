"""Prompts become tokens: texts, messages, and the rendering of a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import load
from engine.core.errors import ConfigError, ModelError, RequestError
from engine.text.chat import Rendering
from engine.text.encode import encode_text
from engine.weights.tokenizer import load_tokenizer, tokenizer_of
from tests.conftest import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a b"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if think %} {{ think }}{% endif %}{% endif %}"
)


def rendered(**options: Any) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    text: str = tokenizer.decode(encode_text(tokenizer, SAID, rendering=Rendering(**options)))
    return text


def test_an_answer_begins_after_the_last_message_or_continues_it() -> None:
    assert rendered() == "user: hi<|end|>assistant: a b<|end|>assistant:"
    assert rendered(variables={"think": "hard"}) == "user: hi<|end|>assistant: a b<|end|>assistant: hard"
    assert rendered(opens_answer=False) == "user: hi<|end|>assistant: a b<|end|>"
    assert rendered(opens_answer=False, continues=True) == "user: hi<|end|>assistant: a b"


def test_parts_of_text_are_one_text_for_a_template_that_reads_no_parts() -> None:
    def shown(template: str, *parts: dict[str, str]) -> str:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        return str(tokenizer.decode(encode_text(tokenizer, [{"role": "user", "content": [*parts]}])))

    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    reads_parts = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}"
    hi, there = {"type": "text", "text": "hi "}, {"type": "text", "text": "there"}
    assert shown(plain, hi, there) == "hi there"
    assert shown(reads_parts, hi, there) == "[hi ][there]"
    assert "image" in shown(plain, hi, {"type": "image", "url": "x"})


def test_text_becomes_one_user_message_unless_raw() -> None:
    assert TOKENIZER.decode(encode_text(TOKENIZER, "hi")) == "<|user|>hi<|assistant|>"
    assert TOKENIZER.decode(encode_text(TOKENIZER, "hi", raw=True)) == "hi"


def test_what_is_no_prompt_is_refused() -> None:
    for prompt, said in (
        ([{"role": "user", "content": "hi \ud83d"}], "^prompt: holds half a character"),
        ([{"text": "hi"}], "role and content"),
    ):
        with pytest.raises(RequestError, match=said):
            encode_text(TOKENIZER, prompt)
    with pytest.raises(RequestError, match="half a character"):
        rendered(variables={"think": "\ud83d"})
    for name in ("chat_template", "messages", "sanitize_control_tokens", "tokenize", "tools"):
        with pytest.raises(RequestError, match=rf"^chat_template_kwargs\.{name}: is no variable"):
            rendered(variables={name: False})


def test_a_model_without_tokenizer_files_is_told_which_to_copy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"has no tokenizer: copy tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_chat_template_of_ones_own_is_used(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}<{{ message['content'] }}>{% endfor %}")
    tokenizer = tokenizer_of(load({"model": tiny, "chat_template": str(file)}))
    assert encode_text(tokenizer, "hi") == encode_text(tokenizer, "<hi>", raw=True)
    with pytest.raises(ConfigError, match=r"chat_template=nowhere: cannot be read"):
        tokenizer_of(load({"model": tiny, "chat_template": "nowhere"}))

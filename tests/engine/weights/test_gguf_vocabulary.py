"""Tokens of a text are those that llama.cpp makes of it with the same GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.text.encode import encode_text
from engine.weights.tokenizer import load_tokenizer
from tests.engine.weights.tiny_gguf import SPECIAL, TEMPLATE, TOKENS

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]


def test_control_tokens_of_letters_that_no_byte_has_keep_their_ids(directory: Callable[..., Path]) -> None:
    template = "{{ bos_token }}" + TEMPLATE
    for ours, theirs in zip(SPECIAL, DEEPSEEK, strict=True):
        template = template.replace(ours, theirs)
    values = {"tokenizer.ggml.tokens": [*DEEPSEEK, *TOKENS[4:]], "tokenizer.chat_template": template}
    tokenizer = load_tokenizer(str(directory(values=values)))
    assert encode_text(tokenizer, "hi") == [0, 1, TOKENS.index("h"), TOKENS.index("i"), 3, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 3, len(TOKENS))


def test_a_token_of_spaces_that_the_user_defined_is_none_of_the_vocabularys_own(directory: Callable[..., Path]) -> None:
    place = TOKENS.index("~")
    kinds = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(TOKENS) - len(SPECIAL))
    kinds[place] = USER_DEFINED
    named = ["  " if token == "~" else token for token in TOKENS]
    values = {"tokenizer.ggml.tokens": named, "tokenizer.ggml.token_type": kinds}
    tokenizer = load_tokenizer(str(directory(values=values)))
    ids = tokenizer.encode("a  a")
    assert ids == [TOKENS.index("a"), place, TOKENS.index("a")]
    assert tokenizer.decode(ids) == "a  a" and tokenizer.convert_ids_to_tokens(TOKENS.index("ĠĠ")) == "ĠĠ"

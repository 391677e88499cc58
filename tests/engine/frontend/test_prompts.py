"""Prompts, before they reach the engine."""

from __future__ import annotations

import pytest

from engine.core.errors import RequestError
from engine.frontend.prompts import encode_prompt
from tests.conftest import sentencepiece_tokenizer, tiny_tokenizer


def test_an_empty_raw_text_is_the_token_that_begins_texts() -> None:
    tokenizer = sentencepiece_tokenizer()
    assert encode_prompt(tokenizer, "", True, len(tokenizer)) == [tokenizer.bos_token_id]


def test_without_such_a_token_an_empty_text_is_refused() -> None:
    for tokenizer, raw in ((tiny_tokenizer(), True), (sentencepiece_tokenizer(), False)):
        with pytest.raises(RequestError, match="prompt: is empty"):
            encode_prompt(tokenizer, "", raw, len(tokenizer))

"""Tokens as clients see them, one by one: their text and their bytes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_INCOMPLETE = "\ufffd"


class Vocabulary:
    """tokenizer: of `transformers`. A token may be part of a character: its text is U+FFFD then, its bytes exact."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=1 << 16)(self._text)
        self.bytes = lru_cache(maxsize=1 << 16)(self._bytes)

    def texts(self, tokens: list[int]) -> str:
        """The text of several tokens together, special ones included."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _text(self, token: int) -> str:
        return self.texts([token])

    def _bytes(self, token: int) -> list[int]:
        text = self.text(token)
        if _INCOMPLETE not in text:
            return list(text.encode())
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if byte := _BYTE.fullmatch(piece):
            return [int(byte[1], 16)]
        known = _byte_level()
        return [known[letter] for letter in piece] if all(letter in known for letter in piece) else list(text.encode())


@lru_cache(maxsize=1)
def _byte_level() -> dict[str, int]:
    """The byte of each letter in byte-level vocabularies, as GPT-2 chose them: printable bytes stand for themselves,
    the others for the characters after U+00FF.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

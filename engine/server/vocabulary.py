"""Tokens as clients see them, one by one: their text and their bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from engine.text import TextStream

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_INCOMPLETE = "\ufffd"


class Vocabulary:
    """tokenizer: of `transformers`. A token may be part of a character: its text is U+FFFD then, its bytes exact."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._anchor: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self.text = lru_cache(maxsize=1 << 16)(self._text)
        self.bytes = lru_cache(maxsize=1 << 16)(self._bytes)

    def texts(self, tokens: list[int]) -> str:
        """The text of several tokens together, special ones included."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def stream(self, special: bool = False, behind: Sequence[int] = ()) -> TextStream:
        """The text of tokens one after another, as the engine makes it: see `TextStream`."""
        return TextStream(self._tokenizer, special=special, behind=behind)

    def prompt_offsets(self, tokens: list[int], text: str) -> list[int]:
        """Where each token of a prompt begins in its text. Special tokens that the tokenizer has added begin at 0."""
        added = 0
        while added < len(tokens) and self._is_special(tokens[added]) and not text.startswith(self.text(tokens[added])):
            added += 1
        stream = self.stream(special=True)
        return [0] * added + [offset(stream, token) for token in tokens[added:]]

    def _is_special(self, token: int) -> bool:
        text: str = self._tokenizer.decode([token], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return not text

    def _text(self, token: int) -> str:
        """Decoded after another token, since the decoders of SentencePiece drop the space that a text begins with."""
        return self.texts([*self._anchor, token])[len(self.texts(self._anchor)) :]

    def _bytes(self, token: int) -> list[int]:
        text = self.text(token)
        if _INCOMPLETE not in text:
            return list(text.encode())
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if byte := _BYTE.fullmatch(piece):
            return [int(byte[1], 16)]
        known = _byte_level()
        return [known[letter] for letter in piece] if all(letter in known for letter in piece) else list(text.encode())


def offset(stream: TextStream, token: int) -> int:
    """Where `token` begins in the stream's text, to which it is added. The tokens of one character begin together."""
    begins = len(stream.text)
    stream.push(token)
    return begins


@lru_cache(maxsize=1)
def _byte_level() -> dict[str, int]:
    """The byte of each letter in byte-level vocabularies, as GPT-2 chose them: printable bytes stand for themselves,
    the others for the characters after U+00FF.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

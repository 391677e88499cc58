"""Tokens as clients see them, one by one: their text and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from engine.text.stream import TextStream
from engine.text.token_pieces import PARTIAL, raw_bytes


class Vocabulary:
    """The tokens of one model as clients see them. tokenizer: of `load_tokenizer`. A token may be part of a character:
    its text is U+FFFD then, its bytes exact.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._anchor: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self.text = lru_cache(maxsize=1 << 16)(self._text)
        self.bytes = lru_cache(maxsize=1 << 16)(self._bytes)

    def texts(self, tokens: list[int]) -> str:
        """Return the text of several tokens together, special ones included."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def stream(self, special: bool = False, before: Sequence[int] = ()) -> TextStream:
        """Return a stream of the text of tokens one after another, as the engine makes it: see `TextStream`."""
        return TextStream(self._tokenizer, special=special, before=before)

    def prompt_offsets(self, tokens: list[int], text: str) -> list[int]:
        """Return where each token of a prompt begins in its text. Special tokens that the tokenizer has added begin at
        0.
        """
        added = 0
        while added < len(tokens) and self._is_special(tokens[added]) and not text.startswith(self.text(tokens[added])):
            added += 1
        stream = self.stream(special=True)
        return [0] * added + [offset(stream, token) for token in tokens[added:]]

    def _is_special(self, token: int) -> bool:
        text: str = self._tokenizer.decode([token], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return not text

    def _text(self, token: int) -> str:
        """Decode a token after another one, since the decoders of SentencePiece drop the space that a
        text begins with.
        """
        return self.texts([*self._anchor, token])[len(self.texts(self._anchor)) :]

    def _bytes(self, token: int) -> list[int]:
        text = self.text(token)
        known = raw_bytes(self._tokenizer, token) if PARTIAL in text else None
        return list(text.encode() if known is None else known)


def offset(stream: TextStream, token: int) -> int:
    """Return where `token` begins in the stream's text, to which it is added. The tokens of one character begin
    together.
    """
    begins = len(stream.text)
    stream.push(token)
    return begins

"""Tokens to text, piece by piece: whole characters only, and nothing that may turn out to begin a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"


class TextStream:
    """Detokenises one answer. `push` tokens, `take` what can be shown; `text` is all there is so far.

    tokenizer: a `transformers` tokenizer. A window of the last tokens is decoded with and without the newest, because
    a token's text depends on its neighbours (word-initial spaces, characters of several tokens).
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._window, self._read = 0, 0
        self._shown = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; true once a stop string is complete, which ends the text before it."""
        self._tokens.append(token)
        known, now = self._decode(self._read), self._decode(len(self._tokens))
        if not now.endswith(_INCOMPLETE):
            self._append(now[len(known) :])
        return self.stopped

    def take(self, final: bool = False) -> str:
        """Text not taken yet. `final`: nothing follows, so keep nothing back."""
        if final and not self.stopped:
            self._append(self._decode(len(self._tokens))[len(self._decode(self._read)) :])
        end = len(self.text) - (0 if final or self.stopped else self._held_back())
        piece, self._shown = self.text[self._shown : end], max(self._shown, end)
        return piece

    def _decode(self, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._tokens[self._window : end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _append(self, piece: str) -> None:
        self._window, self._read = self._read, len(self._tokens)
        searched = len(self.text)
        self.text += piece
        ends = [
            at for stop in self._stop if (at := self.text.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if ends:
            self.text, self.stopped = self.text[: min(ends)], True

    def _held_back(self) -> int:
        """Length of the longest tail that begins a stop string."""
        return max(
            (n for stop in self._stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])), default=0
        )

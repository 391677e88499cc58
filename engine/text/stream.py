"""Text to tokens and back. The text comes back in pieces of whole characters that cannot begin a stop string."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Container, Sequence
from typing import Any

from engine.text.token_pieces import PARTIAL, partial_bytes, special_tokens

_BEHIND = range(6, 10)  # tokens before an answer, to decode its first ones with: some may be special, four a character


class TextStream:
    """Detokenises one answer. `push` tokens, `take` what can be shown; `text` is all there is so far, and `stop_text`
    the stop string that has ended it, "" if none has.

    tokenizer: of `load_tokenizer`. A window of the last tokens is decoded with and without the newest, because a
    token's text depends on its neighbours (word-initial spaces). Tokens that are parts of characters are decoded here,
    byte by byte: only an incomplete character is waited for, not every U+FFFD that a text ends in. special: special
    tokens are part of the text; visible: these tokens are. before: the tokens before the answer, without which the
    decoders of SentencePiece drop the space that it begins with.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        special: bool = False,
        before: Sequence[int] = (),
        visible: Container[int] = (),
    ):
        self._tokenizer, self._stop = tokenizer, [StopText(text) for text in stop]
        named = special_tokens(tokenizer)
        self._stop_tokens = {token: text for token, text in named.items() if text in stop} if stop else {}
        self._hidden = set() if special else {token for token in named if token not in visible}
        self._skips_special = self._hidden == named.keys()
        self._tokens = self._whole_end(before)
        self._window, self._read = 0, len(self._tokens)
        self._bytes = getincrementaldecoder("utf8")("replace")
        self._shown = 0
        self.text = ""
        self._may_stop, self.stop_text = True, ""

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Add a token; return whether a stop string is complete, which ends the text before it. may_stop: whether a
        stop string that ends with this token counts.
        """
        self._may_stop = may_stop
        if may_stop and token in self._stop_tokens:
            self._append(self._bytes.decode(b"", final=True))
            self.stop_text = self.stop_text or self._stop_tokens[token]
        elif token not in self._hidden:
            self._append(self._text_of(token))
        return bool(self.stop_text)

    def take(self, final: bool = False) -> str:
        """Return the text that was not taken yet. final: nothing follows, so nothing is held back."""
        if final and not self.stop_text:
            self._append(self._bytes.decode(b"", final=True))
        end = len(self.text)
        if not final and not self.stop_text:
            end -= max((stop.matched for stop in self._stop), default=0)
        piece, self._shown = self.text[self._shown : end], max(self._shown, end)
        return piece

    def _text_of(self, token: int) -> str:
        """Return the text that is complete with `token`, which is added."""
        self._tokens.append(token)
        if (part := partial_bytes(self._tokenizer, token)) is not None:
            piece = self._bytes.decode(part)
        else:
            known, now = (self._decode(self._tokens[self._window : end]) for end in (self._read, len(self._tokens)))
            piece = self._bytes.decode(b"", final=True) + now[len(known) :]
        if piece:  # the space after a special token that shows nothing would be dropped if the window began there
            self._window = self._read
        self._read = len(self._tokens)
        return piece

    def _whole_end(self, tokens: Sequence[int]) -> list[int]:
        """Return a few of the last tokens whose text is whole characters: half of one would spoil what it is decoded
        with.
        """
        for count in _BEHIND:
            last = [*tokens[-count:]]
            text = self._decode(last)
            if not text.startswith(PARTIAL):
                return [] if text.endswith(PARTIAL) else last
        return []

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False
        )
        return text

    def _append(self, piece: str) -> None:
        begins = [(at, stop.text) for stop in self._stop if (at := stop.find(piece, self._may_stop)) is not None]
        before = len(self.text)
        self.text += piece
        if begins:
            first, self.stop_text = min(begins, key=lambda one: one[0])
            self.text = self.text[: max(0, before + first)]


class StopText:
    """A stop text that is looked for. matched: how many characters of the stop text's beginning the answer ends with;
    never all of them.
    """

    def __init__(self, text: str):
        self.text, self.matched = text, 0
        self._shorter = [0] * len(text)
        """The next shorter match for the match of each length, less one."""
        for end in range(1, len(text)):
            self._shorter[end] = self._after(self._shorter[end - 1], text[end])

    def find(self, piece: str, counts: bool = True) -> int | None:
        """Read the answer's next `piece`. Returns where in it the stop text begins, below 0 if in an earlier piece, or
        None if it is not complete. counts: whether a stop text that ends in this piece is to be found.
        """
        for end, character in enumerate(piece, 1):
            self.matched = self._after(self.matched, character)
            if self.matched == len(self.text):
                self.matched = self._shorter[-1]
                if counts:
                    return end - len(self.text)
        return None

    def _after(self, matched: int, character: str) -> int:
        """Return the length of the match after one more character."""
        while matched and self.text[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == character)

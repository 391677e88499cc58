"""Tells what single tokens are: special ones, and parts of characters with their bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

PARTIAL = "\ufffd"
"""Decoders write this in place of bytes that are no character."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass
class _Known:
    """What was found out about a tokenizer's tokens. special: special tokens with their texts. partial: see
    `partial_bytes`.
    """

    special: dict[int, str]
    partial: dict[int, bytes | None] = field(default_factory=dict)


_known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the special tokens of a tokenizer, with their texts."""
    return _known_of(tokenizer).special


def partial_bytes(tokenizer: Any, token: int) -> bytes | None:
    """Return the bytes of a token that may be a part of a character, None if it is text or its bytes are not known.

    A token `<0x0A>` counts as a part: next to bytes that are no character, its decoder would not show it either.
    """
    partial = _known_of(tokenizer).partial
    if token not in partial:
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        code = raw_bytes(tokenizer, token)
        is_byte = _is_byte(tokenizer, token) and code in (text.encode(), b" " + text.encode())  # dropped if it is first
        partial[token] = code if PARTIAL in text or is_byte else None
    return partial[token]


def _known_of(tokenizer: Any) -> _Known:
    if tokenizer not in _known:
        added = tokenizer.added_tokens_decoder.items()
        _known[tokenizer] = _Known({token: shown.content for token, shown in added if shown.special})
    return _known[tokenizer]


def raw_bytes(tokenizer: Any, token: int) -> bytes | None:
    """Return the bytes that a token's piece of the vocabulary stands for; None if the piece does not say."""
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    if isinstance(piece, bytes):
        return piece
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    known = _byte_level()
    return bytes(known[letter] for letter in piece) if piece and all(letter in known for letter in piece) else None


def _is_byte(tokenizer: Any, token: int) -> bool:
    return bool(_BYTE.fullmatch(str(tokenizer.convert_ids_to_tokens(token))))


@lru_cache(maxsize=1)
def _byte_level() -> dict[str, int]:
    """Return the byte of each letter in byte-level vocabularies, as GPT-2 chose them: printable bytes stand for
    themselves, the others for the characters after U+00FF.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

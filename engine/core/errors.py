"""Every error Talon raises on purpose. Each message is one line that names the field and the fix.

Messages repeat what files and strangers hold. `shown` is how a value stands in a message, and every message passes
through `printable` before anyone sees it.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

HALF_A_CHARACTER = "holds half a character; decode the text it comes from as UTF-8"
_MOST_VALUE = 100  # characters of a value that a message repeats
_MOST_LINE = 2000  # characters of a message

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def shown(value: Any) -> str:
    """Return a value as messages repeat it: as Python writes it, shortened, with everything that does not print
    escaped.
    """
    try:
        text = _repr.repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"<{type(value).__name__}>"
    return printable(text, _MOST_VALUE)


def printable(text: str, most: int = _MOST_LINE) -> str:
    """Return `text` as one line that is safe in a terminal, without its middle if it is longer than
    `most` characters.
    """
    if len(text) > most:
        text = f"{text[: most * 2 // 3]} ... {text[-(most // 3) :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def is_text(text: str) -> bool:
    """Return whether UTF-8 can encode it. Where JSON's two escapes of one character were cut, a lone
    surrogate is left.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """Return the end of an error: the most similar known name, if there is one. before: what precedes the name."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {before}{near[0]}?" if near else ""


class TalonError(Exception):
    """Base of all errors a caller of Talon can expect. Its message is one printable line."""

    def __init__(self, message: str = ""):
        super().__init__(printable(message))


class ConfigError(TalonError, ValueError):
    """A configuration key or value is wrong."""


class RequestError(TalonError, ValueError):
    """A prompt or sampling parameter is wrong; the engine was not touched."""


class OverContext(RequestError):
    """Prompt and answer together are longer than a request may be. tokens: of the prompt; answer: of the answer, 0 if
    the prompt alone is too long; most: tokens of both that fit.
    """

    def __init__(self, message: str, tokens: int = 0, answer: int = 0, most: int = 0):
        super().__init__(message)
        self.tokens, self.answer, self.most = tokens, answer, most


class ModelError(TalonError):
    """A model directory is missing, incomplete, or of a family that cannot verify a tree."""


class DrafterMismatch(ModelError):
    """The drafter was made for another target."""


class RequestFailed(TalonError):
    """The verifier could not continue this request (out of memory, say); others are not affected."""


class NotANumber(RequestFailed):
    """The target's logits hold NaN, and no token can be chosen."""


class QueueFull(TalonError):
    """The engine refuses more work (`queue.full: refuse`)."""


class EngineClosed(TalonError):
    """The engine was closed while, or before, the request ran."""


class WorkerDied(TalonError):
    """A worker died and cannot be started again; the message says why."""


class ProtocolError(TalonError):
    """A message does not follow `engine.wire.messages`; it is dropped and counted."""


class OutOfBlocks(TalonError):
    """The pool of keys and values has too few free blocks; the request waits, or another is preempted."""


class StateLost(TalonError):
    """The states of requests are not known any more: the worker ends, and the next one computes them again."""


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, printable; its type if it has none."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])

"""Finds text that changes from prompt to prompt and stands before a long text that does not: a date, a folder, the
state of a repository. The prefix cache finds the tokens before it, so all tokens after it are read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_KEPT = 16  # prompts to compare with
_LEAST = 128  # tokens behind a change that are worth a word
_WIDEST = 512  # tokens of a change: what is longer is another text
_WINDOW = 32  # tokens by which the text behind a change is recognised
_STEP = 16  # tokens between the windows that are tried
_LISTED = 32  # changes that are remembered
Prompt = NDArray[np.int32]


class ChangedSpan(NamedTuple):
    """A change within a prompt. at: tokens before the change, which are those of an earlier prompt; tokens: how many it
    has; behind: how many follow that stood in the earlier prompt too.
    """

    at: int
    tokens: int
    behind: int


class ChangedText:
    """Compares each prompt with the latest ones. tokens: all that were read again behind a change; times: how often a
    change was seen after so many tokens; latest: the change there, and its text if that may be shown.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.times: dict[int, int] = {}
        self.latest: dict[int, tuple[ChangedSpan, str | None]] = {}
        self._prompts: deque[Prompt] = deque(maxlen=_KEPT)

    def compare(self, prompt: Sequence[int]) -> ChangedSpan | None:
        """Return the change before most of the prompt that the prefix cache cannot find for it, if there is one."""
        text = np.asarray(prompt, np.int32)
        alike = [(other, _alike(text, other)) for other in self._prompts]
        found = max((length for _, length in alike), default=0)
        changes = [_change(text, found, other, length) for other, length in alike]
        self._remember(text, alike)
        return max(filter(None, changes), key=lambda change: change.behind, default=None)

    def add(self, change: ChangedSpan, text: str | None) -> bool:
        """Count a change, and return whether it is the first one there."""
        first = change.at not in self.times
        if first and len(self.times) == _LISTED:
            oldest = next(iter(self.times))
            del self.times[oldest], self.latest[oldest]
        self.times[change.at] = self.times.get(change.at, 0) + 1
        self.latest[change.at] = change, text
        self.tokens += change.behind
        return first

    def _remember(self, text: Prompt, alike: Sequence[tuple[Prompt, int]]) -> None:
        """Keep the prompt, in the place of those that it continues."""
        for other, length in alike:
            if length == len(other):
                self._prompts = deque((one for one in self._prompts if one is not other), _KEPT)
        self._prompts.append(text)


def _alike(text: Prompt, other: Prompt) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(text), len(other))
    differ = text[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _change(text: Prompt, found: int, other: Prompt, alike: int) -> ChangedSpan | None:
    """Return the span of `text` behind its first `found` tokens that `other` has otherwise: both go on alike after it.
    `other` differs from `text` from token `alike` on. None if it does not go on alike soon.
    """
    earlier = other[alike : alike + _WIDEST + _WINDOW].tobytes()
    for at in range(found, min(found + _WIDEST, len(text) - _LEAST) + 1, _STEP):
        byte = earlier.find(text[at : at + _WINDOW].tobytes())
        if byte < 0 or byte % other.itemsize:
            continue
        place = alike + byte // other.itemsize
        back = _alike(text[found:at][::-1], other[alike:place][::-1])
        behind = back + _alike(text[at:], other[place:])
        if behind >= _LEAST:
            return ChangedSpan(found, at - back - found, behind)
    return None

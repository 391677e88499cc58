"""The rounds in which a drafter gives a known answer. Light: `talon` imports it before options are checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from engine.core.tree import TokenTree

FollowedRound = tuple[TokenTree, list[int], list[int], float]
"""The tree, its accepted path, the tokens emitted, and the seconds that drafting took."""


def followed(answer: Sequence[int], propose: Callable[[], TokenTree], position: int = 0) -> Iterator[FollowedRound]:
    """The rounds in which a known answer is given, from `position` on. propose: returns the next round's tree."""
    while position < len(answer):
        started = time.perf_counter()
        tree = propose()
        draft_s = time.perf_counter() - started
        path = accepted(tree, answer[position:])
        yield tree, path, [*answer[position : position + len(path)]], draft_s
        position += len(path)


def accepted(tree: TokenTree, answer: Sequence[int]) -> list[int]:
    """The nodes, root first, that the answer follows; at its end one token is left for the bonus."""
    path = [0]
    for token in answer[:-1]:
        if (child := tree.child(path[-1], token)) is None:
            break
        path.append(child)
    return path

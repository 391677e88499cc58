"""Matches: the latest place in a text after the same last tokens, followed for as long as it agrees."""

from __future__ import annotations

import numpy as np

from engine.kernels.subroutine import subroutine
from retrieval_index.ngrams.contexts import mix
from retrieval_index.ngrams.store import END, START

MATCH = 6  # tokens that must agree before a match is followed
LONGEST = 32  # a match found is compared this far back


@subroutine
def match_hash(text, position, start):  # type: ignore[no-untyped-def]
    """Return the hash of the MATCH tokens before `position`, 0 if there are fewer."""
    mask = len(text) - 1
    h = np.uint64(1)
    for back in range(1, MATCH + 1):
        at = position - back
        if at < start or text[at & mask] < 0:
            return np.int64(0)
        h = mix(h, text[at & mask])
    return np.int64(h >> np.uint64(20)) | 1 << 44


@subroutine
def follow(text, heads, state, tail, position, start, match, length):  # type: ignore[no-untyped-def]
    """Advance a match (where, how long) past the token at `position - 1` of `tail`, or find a new one if it is lost."""
    mask, tail_mask = len(text) - 1, len(tail) - 1
    if length > 0 and state[START] <= match < state[END] and text[match & mask] == tail[(position - 1) & tail_mask]:
        return match + 1, length + 1
    h = match_hash(tail, position, start)
    if h == 0:
        return np.int64(0), np.int64(0)
    at = np.int64(heads[h & (len(heads) - 1)])
    at += (state[END] - 1 - at) & ~np.int64(0x7FFFFFFF)  # heads hold the low 31 bits
    length = np.int64(0)
    while length < LONGEST and at - length > state[START] and position - length > start:
        if text[(at - 1 - length) & mask] != tail[(position - 1 - length) & tail_mask]:
            break
        length += 1
    if length < MATCH or at >= state[END]:
        return np.int64(0), np.int64(0)
    return at, length


@subroutine
def next_of(text, state, match, length):  # type: ignore[no-untyped-def]
    """Return the token that a match says comes next, -1 if it says nothing."""
    token = np.int32(-1)
    if length > 0 and match >= state[START] and match < state[END]:
        token = text[match & (len(text) - 1)]
    return token

"""Compiled kernels of the datastore: binary search in a suffix array, and reading what follows."""

from __future__ import annotations

import numpy as np

from engine.kernels.subroutine import subroutine
from retrieval_index.ngrams.kernel import kernel


@subroutine
def _bound(tokens, suffixes, pattern, first, low, after):  # type: ignore[no-untyped-def]
    """Return the first suffix at or after `low` that is not less than pattern[first:], or with `after` is greater than
    it.
    """
    high = len(suffixes)
    while low < high:
        middle = (low + high) // 2
        at = np.int64(suffixes[middle])
        order = 0  # the suffix compared with the pattern
        for i in range(first, len(pattern)):
            if at == len(tokens):
                order = -1
                break
            token = np.int64(tokens[at])
            if token != pattern[i]:
                order = -1 if token < pattern[i] else 1
                break
            at += 1
        if order < 0 or (after and order == 0):
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def longest_match(tokens, suffixes, pattern, shortest):  # type: ignore[no-untyped-def]
    """Return (length, first, last): the suffixes [first, last) begin with the longest ending of `pattern` that occurs.

    If an ending occurs, so do all shorter ones, so the length is found by bisection too.
    """
    found, first, last = 0, 0, 0
    low, high = shortest, len(pattern)
    while low <= high:
        length = (low + high) // 2 if found or high < 6 else low  # most matches are short
        start = _bound(tokens, suffixes, pattern, len(pattern) - length, 0, False)
        at, matches = np.int64(0), start < len(suffixes)
        if matches:
            at = np.int64(suffixes[start])
            matches = at + length <= len(tokens)
        if matches:
            for i in range(length):
                if np.int64(tokens[at + i]) != pattern[len(pattern) - length + i]:
                    matches = False
                    break
        if matches:
            found, first, low = length, start, length + 1
        else:
            high = length - 1
    if found:
        last = _bound(tokens, suffixes, pattern, len(pattern) - found, first, True)
    return found, first, last


@kernel
def read(tokens, suffixes, first, last, skip, depth, samples, separator):  # type: ignore[no-untyped-def]
    """Return [occurrences, depth] int32: what follows `skip` tokens of at most `samples` of the suffixes
    [first, last).
    """
    count = min(last - first, samples)
    rows = np.full((count, depth), -1, np.int32)
    for row in range(count):
        at = np.int64(suffixes[first + row * (last - first) // count]) + skip
        for i in range(min(depth, len(tokens) - at)):
            if np.int64(tokens[at + i]) == separator:
                break
            rows[row, i] = tokens[at + i]
    return rows


@kernel
def likeliest(rows, root, nodes):  # type: ignore[no-untyped-def]
    """Return the `nodes` most frequent nodes, root included, of the sorted rows' trie: tokens, parents and shares of
    rows.
    """
    occurrences, depth = rows.shape
    capacity = occurrences * depth + 1
    tokens, parents = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    counts, above = np.zeros(capacity, np.int32), np.zeros(depth + 1, np.int32)
    tokens[0], parents[0], counts[0] = root, -1, occurrences + 1
    size = 1
    for row in range(occurrences):
        same = row > 0
        for level in range(depth):
            if rows[row, level] < 0:
                break
            same = same and rows[row, level] == rows[row - 1, level]
            if not same:
                tokens[size], parents[size] = rows[row, level], above[level]
                above[level + 1] = size
                size += 1
            counts[above[level + 1]] += 1
    order = np.argsort(-counts[:size], kind="mergesort")[:nodes]  # a stable sort, so parents stay before their children
    place = np.zeros(size, np.int32)
    kept_tokens, kept_parents = np.empty(len(order), np.int32), np.empty(len(order), np.int32)
    shares = np.empty(len(order), np.float64)
    for new in range(len(order)):
        old = order[new]
        place[old] = new
        kept_tokens[new], shares[new] = tokens[old], counts[old] / occurrences
        kept_parents[new] = place[parents[old]] if new else -1
    return kept_tokens, kept_parents, shares

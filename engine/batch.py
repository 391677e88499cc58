"""What one forward of the target computes: segments of several requests as flat arrays, one row a token.

No padding, no mask: a row says which positions of its own request it sees, and attention reads just those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.tree import TokenTree

BLOCK = 16  # positions of a block of the pool

Int = NDArray[np.int32]
Wanted = Literal["all", "last", "none"]


@dataclass(frozen=True, eq=False)
class Segment:
    """One request's part of a forward: a tree's nodes, or a chunk of its prompt.

    tokens: [rows] int32. tree: None for a chunk. cache: where the request's keys and values are; past: its committed
    positions. pending: the tree's nodes that earlier forwards have done (a draft model grows its tree level by level).
    wanted: the rows whose logits are asked for.
    """

    tokens: Int
    tree: TokenTree | None
    cache: Any
    past: int
    pending: int = 0
    wanted: Wanted = "all"

    @classmethod
    def of_tree(cls, tree: TokenTree, cache: Any, first: int = 0) -> Segment:
        """The nodes of a tree from `first` on; those before it were forwarded already."""
        return cls(tree.tokens[first:], tree, cache, cache.length, first)

    @classmethod
    def of_text(cls, tokens: Sequence[int], cache: Any, wanted: Wanted = "last") -> Segment:
        """The next tokens of a request's text."""
        return cls(np.asarray(tokens, np.int32), None, cache, cache.length, 0, wanted)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def sight(self) -> tuple[list[int], list[list[int]]]:
        """For each row: how many positions of the text it sees, its own path included as far as that lies in order
        behind the text; and the slots of the rest of its path.
        """
        start = self.past + self.pending
        if self.tree is None:
            return list(range(start + 1, start + 1 + len(self))), [[]] * len(self)
        prefixes: list[int] = []
        others: list[list[int]] = []
        for node, parent in enumerate(self.tree.parents.tolist()):
            slot = self.past + node
            prefix, rest = (prefixes[parent], others[parent]) if parent >= 0 else (self.past, [])
            if prefix == slot and not rest:
                prefixes.append(slot + 1)
                others.append(rest)
            else:
                prefixes.append(prefix)
                others.append([*rest, slot])
        return prefixes[self.pending :], others[self.pending :]


@dataclass(frozen=True, eq=False)
class Batch:
    """Flat arrays over the rows of all segments, in their order, all int32.

    tokens, positions, slots: [rows]; a slot is a place in the pool. spans: each segment's first row and the one behind
    its last. prefixes: [rows] positions of its text that a row sees; others: [rows + 1] where in `listed` the places of
    the rest of its path begin. table_of: [rows] where in `tables` its request's blocks begin. chosen: rows whose logits
    are wanted, and chosen_spans where each segment's lie among them.
    """

    segments: tuple[Segment, ...]
    tokens: Int
    positions: Int
    slots: Int
    spans: list[tuple[int, int]]
    prefixes: Int
    others: Int
    listed: Int
    tables: Int
    table_of: Int
    chosen: Int
    chosen_spans: list[tuple[int, int]]

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Batch:
        segments = tuple(segments)
        prefixes: list[int] = []
        others: list[list[int]] = []
        for segment in segments:
            prefix, rest = segment.sight
            prefixes += prefix
            others += rest
        counts = [len(rest) for rest in others]
        seen = np.asarray(prefixes, np.int32)
        ends = list(accumulate(len(segment) for segment in segments))
        spans = [(end - len(segment), end) for segment, end in zip(segments, ends, strict=True)]
        wanted = [
            range(_first_wanted(segment, start), end) for segment, (start, end) in zip(segments, spans, strict=True)
        ]
        wanted_ends = list(accumulate(map(len, wanted)))
        table_starts = accumulate([len(segment.cache.table) for segment in segments], initial=0)
        return cls(
            segments,
            np.concatenate([segment.tokens for segment in segments]),
            seen + np.asarray(counts, np.int32) - 1,
            np.concatenate([_slots(segment) for segment in segments]),
            spans,
            seen,
            np.asarray([0, *accumulate(counts)], np.int32),
            np.asarray([slot for rest in others for slot in rest] or [0], np.int32),
            np.concatenate([segment.cache.table for segment in segments]),
            np.repeat(np.asarray([*table_starts][:-1], np.int32), [len(segment) for segment in segments]),
            np.asarray([row for rows in wanted for row in rows], np.int32),
            [(end - len(rows), end) for rows, end in zip(wanted, wanted_ends, strict=True)],
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def tiles(self, rows: int) -> Int:
        """[tiles + 1] int32: the first row of each group of at most `rows` rows of one segment."""
        starts = [row for first, end in self.spans for row in range(first, end, rows)]
        return np.asarray([*starts, len(self)], np.int32)


def _first_wanted(segment: Segment, start: int) -> int:
    if segment.wanted == "all":
        return start
    return start + len(segment) - (segment.wanted == "last")


def _slots(segment: Segment) -> Int:
    places = np.arange(len(segment), dtype=np.int32) + (segment.past + segment.pending)
    slots: Int = segment.cache.table[places // BLOCK] * np.int32(BLOCK) + places % np.int32(BLOCK)
    return slots

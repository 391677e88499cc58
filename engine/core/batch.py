"""The input of one forward of the target or a draft head: rows of several requests, one token each, as flat arrays.

There is no padding and no mask: each row names the positions of its own request that it sees, and attention reads only
those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

import numpy as np

from engine.core.tree import Int as Int
from engine.core.tree import TokenTree

BLOCK_SIZE = 16  # positions of a block of the pool

WantedRows = Literal["all", "last", "none"]


@dataclass(frozen=True, eq=False)
class Rows:
    """One request's rows of a forward, at the slots from `first` on.

    cache: holds the `block_table` of the request's blocks. tokens, positions: [rows]. prefix_lens: how many slots from
    0 on each row sees; ancestors: further slots, ascending, including the row's own unless its prefix covers it.
    """

    cache: Any
    first: int
    tokens: list[int]
    positions: list[int]
    prefix_lens: list[int]
    ancestors: list[list[int]]

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def slots(self) -> list[int]:
        """[rows] the rows' places in the pool, once blocks are reserved for them."""
        low, end = self.first // BLOCK_SIZE, self.first + len(self)
        blocks = self.cache.block_table[low : -(-end // BLOCK_SIZE)].tolist()
        return [blocks[slot // BLOCK_SIZE - low] * BLOCK_SIZE + slot % BLOCK_SIZE for slot in range(self.first, end)]


@dataclass(frozen=True, eq=False)
class Segment:
    """One request's part of a forward: a tree's nodes, or a chunk of its prompt.

    tokens: [rows] int32. tree: None for a chunk. cache: holds the request's keys and values; past: its committed
    positions. pending: tree nodes done by earlier forwards (a draft model grows its tree level by level). wanted: the
    rows whose logits are needed. offset: added to the positions, not to the slots: a trial reads a short text as if it
    stood far into a long one.
    """

    tokens: Int
    tree: TokenTree | None
    cache: Any
    past: int
    pending: int = 0
    wanted: WantedRows = "all"
    offset: int = 0

    @classmethod
    def of_tree(cls, tree: TokenTree, cache: Any, first: int = 0) -> Segment:
        """Make the segment of a tree's nodes from `first` on; those before it were forwarded already."""
        return cls(tree.tokens[first:], tree, cache, cache.length, first)

    @classmethod
    def of_text(cls, tokens: Sequence[int], cache: Any, wanted: WantedRows = "last") -> Segment:
        """Make the segment of the next tokens of a request's text."""
        return cls(np.asarray(tokens, np.int32), None, cache, cache.length, 0, wanted)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def wanted_rows(self) -> int:
        """The number of rows whose logits are wanted."""
        return len(self) if self.wanted == "all" else int(self.wanted == "last")

    @property
    def rows(self) -> Rows:
        """The rows in the form that a `Batch` takes."""
        prefix_lens, ancestors = self.visible_slots
        positions = [self.offset + prefix + len(rest) - 1 for prefix, rest in zip(prefix_lens, ancestors, strict=True)]
        return Rows(self.cache, self.past + self.pending, self.tokens.tolist(), positions, prefix_lens, ancestors)

    @property
    def visible_slots(self) -> tuple[list[int], list[list[int]]]:
        """Return, for each row, the length of the prefix it sees (the text, plus its own path as far as that directly
        follows the text), and the slots of the rest of its path.
        """
        start = self.past + self.pending
        if self.tree is None:
            return list(range(start + 1, start + 1 + len(self))), [[]] * len(self)
        prefix_lens: list[int] = []
        ancestors: list[list[int]] = []
        for node, parent in enumerate(self.tree.parents.tolist()):
            slot = self.past + node
            prefix, rest = (prefix_lens[parent], ancestors[parent]) if parent >= 0 else (self.past, [])
            if prefix == slot and not rest:
                prefix_lens.append(slot + 1)
                ancestors.append(rest)
            else:
                prefix_lens.append(prefix)
                ancestors.append([*rest, slot])
        return prefix_lens[self.pending :], ancestors[self.pending :]


class BatchAddresses(NamedTuple):
    """Where the parts of a batch lie in memory, in order, followed by its tiles."""

    tokens: int
    positions: int
    slots: int
    prefix_lens: int
    table_of: int
    ancestor_ptr: int
    chosen: int
    ancestor_slots: int
    tiles: int


class _Part:
    """One array of a batch, built on first access."""

    def __init__(self, index: int):
        self._index, self._name = index, BatchAddresses._fields[index]

    def __get__(self, batch: Batch, owner: type[Batch]) -> Int:
        part = batch.numbers[batch.starts[self._index] : batch.starts[self._index + 1]]
        array = batch.__dict__[self._name] = np.array(part, np.int32)  # later accesses find it there
        return array


class Batch:
    """Flat int32 arrays over the rows of all requests, in order.

    tokens, positions, slots: [rows]; a slot is a place in the pool. prefix_lens: [rows] how many positions of its text
    a row sees; ancestor_ptr: [rows + 1] where in `ancestor_slots` the rest of its path begins. table_of: [rows] where
    in `tables` its request's blocks begin. chosen: [wanted] rows whose logits are wanted.

    spans: each request's first row and one past its last. tables_of: each request's table. reach: one more than the
    largest position; vocabulary: the range from the lowest token to the highest. segments: what `of` made it of.

    All but the tables are slices of one list, `numbers`, that begin at `starts`. They become arrays on first access:
    after a forward the processor's caches are cold, and building a dozen arrays took as long as a small layer.
    """

    tokens, positions, slots, prefix_lens, table_of, ancestor_ptr, chosen, ancestor_slots = map(_Part, range(8))

    def __init__(self, parts: Sequence[Rows], chosen: Iterable[int] = (), segments: Sequence[Segment] = ()):
        tokens = [token for part in parts for token in part.tokens]
        positions = [position for part in parts for position in part.positions]
        ends = list(accumulate(map(len, parts)))
        self.segments = segments
        self.tables_of: list[Int] = [part.cache.block_table for part in parts]
        table_starts = accumulate(map(len, self.tables_of), initial=0)
        ancestors, wanted = [rest for part in parts for rest in part.ancestors], [*chosen]
        arrays: tuple[list[int], ...] = (
            tokens,
            positions,
            [slot for part in parts for slot in part.slots],
            [prefix for part in parts for prefix in part.prefix_lens],
            [start for start, part in zip(table_starts, parts, strict=False) for _ in part.tokens],
            [0, *accumulate(map(len, ancestors))],
            wanted,
            [slot for rest in ancestors for slot in rest],
        )
        self.starts = [0, *accumulate(map(len, arrays))]
        self.numbers = [*chain.from_iterable(arrays)]
        self.spans = [(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
        self.wanted = len(wanted)
        self.reach = 1 + max(positions)
        self.vocabulary = range(min(tokens), max(tokens) + 1)

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Batch:
        segments = tuple(segments)
        ends = accumulate(map(len, segments))
        wanted = [range(end - one.wanted_rows, end) for one, end in zip(segments, ends, strict=True)]
        return cls([segment.rows for segment in segments], chain.from_iterable(wanted), segments)

    def __len__(self) -> int:
        return self.starts[1]

    @cached_property
    def tables(self) -> Int:
        return np.concatenate(self.tables_of)

    def tiles(self, most: int) -> list[int]:
        """Return [tiles + 1] the first row of each group of at most `most` rows of one request, groups as even as
        possible.
        """
        tiles: list[int] = []
        for first, end in self.spans:
            rows, groups = end - first, -(-(end - first) // most)
            tiles += [first + rows * group // groups for group in range(groups)]
        return [*tiles, len(self)]

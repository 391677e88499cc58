"""Runs the rounds' forwards, and on a GPU launches the next one before the host has read what the latest one drew.

A round of plain decoding verifies one row of each request: the token that the round before draws. The device knows it
first. So that row's forward is launched behind the draws, and while the device computes it, the host reads the receipt,
tells and commits the round, and plans the next.

No text depends on it. A row is taken if the next round asks for that token in that place. Otherwise, as when a request
has ended, was cancelled or preempted, or goes on with a draft, the row is forgotten: its key and value are behind all
that is committed, where nobody reads them, and what is written there later is launched later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import BLOCK_SIZE, Segment
from engine.core.tree import TokenTree
from engine.model.target import Target
from engine.verifier.forward_output import Output
from engine.verifier.request import Request

Rows = tuple[Tensor, Tensor | None]
"""Logits of the rows wanted, and hidden states of all rows, as `Runner.run` returns them."""


@dataclass(frozen=True)
class _Launched:
    """A forward of `roots`, whose tokens the round before draws. places: each one's row, by its cache. blocks: where
    keys and values are written. before: the output of the round before; trees: the roots' in it.
    """

    roots: list[Segment]
    places: dict[Any, int]
    blocks: list[int]
    before: Output
    trees: list[int]
    layers: tuple[int, ...]
    rows: Rows

    def row_of(self, segment: Segment) -> int | None:
        """Return the row that computes this segment; None if there is none."""
        place = self.places.get(segment.cache)
        if place is None or segment.tree is None or len(segment) > 1:
            return None
        known = self.before.known(self.trees[place])
        here = segment.past, _block(segment), [int(segment.tokens[0])]
        return place if here == (self.roots[place].past, self.blocks[place], known) else None


class Ahead:
    """The forwards of a verifier. queued: whether the latest one was launched before the one before it was read."""

    def __init__(self, target: Target):
        self.target, self.queued = target, False
        self._launched: _Launched | None = None

    def run(self, segments: Sequence[Segment], layers: Sequence[int]) -> Rows:
        """Run one forward over all segments, as `Runner.run` does, except for the rows that are launched already."""
        launched, self._launched, self.queued = self._launched, None, False
        if launched is None:
            rows: Rows = self.target.run(segments, layers)
            return rows
        for root in launched.roots:
            root.cache.ahead = 0
        found = [launched.row_of(segment) if launched.layers == tuple(layers) else None for segment in segments]
        self.queued = any(row is not None for row in found)
        if found == [*range(len(launched.roots))]:
            return launched.rows
        rest = [segment for segment, row in zip(segments, found, strict=True) if row is None]
        others: Rows | None = self.target.run(rest, layers) if rest else None
        return _joined(found, launched.rows, rest, others) if self.queued or others is None else others

    def launch(self, requests: Sequence[Request], output: Output, layers: Sequence[int]) -> None:
        """Launch the next forward of these requests, if a device draws the tokens that they go on with. output: what
        the latest one gave for their roots, and nothing else.
        """
        tokens, pool = output.roots, self.target.pool
        if tokens is None or pool is None or pool.layer_states is not None:
            return
        trees = [tree for tree, request in enumerate(requests) if request.left > 1]
        if not trees:
            return
        caches = [requests[tree].cache for tree in trees]
        roots = [Segment(np.zeros(1, np.int32), TokenTree.root_only(0), cache, cache.length + 1) for cache in caches]
        if len(trees) < len(requests):
            tokens = torch.cat([tokens[tree : tree + 1] for tree in trees])
        try:
            rows = self.target.run_roots(roots, tokens, layers)
        except torch.AcceleratorError:
            raise
        except Exception:  # no block is left, say, or no memory: the next round finds out whether it needs any
            return
        for cache in caches:
            cache.ahead = 1
        places, blocks = {cache: row for row, cache in enumerate(caches)}, [*map(_block, roots)]
        self._launched = _Launched(roots, places, blocks, output, trees, tuple(layers), rows)


def _block(root: Segment) -> int:
    """Return the block that a root's key and value are in."""
    return int(root.cache.block_table[root.past // BLOCK_SIZE])


def _joined(found: Sequence[int | None], launched: Rows, rest: Sequence[Segment], others: Rows | None) -> Rows:
    """Put rows that were launched before and those of other segments in the order of all segments. found: the row of
    each segment, None for one of `rest`.
    """

    def join(rows: Tensor, more: Tensor | None, counts: list[int]) -> Tensor:
        following = iter(() if more is None else more.split(counts))
        return torch.cat([next(following) if row is None else rows[row : row + 1] for row in found])

    logits, states = launched
    more_logits, more_states = others or (None, None)
    return (
        join(logits, more_logits, [segment.wanted_rows for segment in rest]),
        None if states is None else join(states, more_states, [*map(len, rest)]),
    )

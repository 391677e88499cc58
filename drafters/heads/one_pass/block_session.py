"""The session of one-pass heads: every tree grows from a *block*, the rows after one place of the text.

The context's keys and values fill the first cache slots, one for each position whose features are known. A block's rows
follow them and are dropped when the next features come. All blocks wanted at once are computed in one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from drafters.heads.growth.policies import Candidates
from drafters.heads.growth.ranking import Ranking
from drafters.heads.one_pass.block_forward import BlockForward, RowQuery
from drafters.heads.one_pass.block_weights import UNKNOWN, BlockWeights, Outputs
from drafters.heads.session import ReadingSession
from drafters.heads.stack import PooledCache
from engine.core.batch import Int, Rows
from engine.core.outcomes import Following

_SYNC_CHUNK = 512  # positions of the context that are read at once
_BLOCKS = 64  # most blocks per synced text


@dataclass(eq=False)
class _Block:
    """A block that was drafted. known: the tokens after the root that it starts with. forward: holds its `rows` rows,
    from `row` on.
    """

    root: int
    known: tuple[int, ...]
    forward: BlockForward
    row: int
    rows: int


@dataclass
class _Nodes:
    """Parallel lists; node 0 is the root. The rows after a node in its block predict what follows it."""

    block: list[int] = field(default_factory=lambda: [0])
    depth: list[int] = field(default_factory=lambda: [0])
    token: list[int] = field(default_factory=lambda: [-1])


class BlockSession(ReadingSession):
    def __init__(self, head: BlockWeights, capacity: int):
        super().__init__()
        self.head, self.depth_limit = head, head.depth
        self.cache = PooledCache(head.stack.pool) if head.stack is not None else None
        self.caches = [] if head.stack is not None else head.new_caches(capacity + _BLOCKS * head.size)
        self.slots = 0
        self.last = torch.empty(0, dtype=head.dtype)  # the last position's context vector, if no stack keeps it
        self.blocks: list[_Block] = []
        self.nodes = _Nodes()
        self._root_token = -1

    def commit(self, start: int, features: Tensor | None, tokens: list[int]) -> None:
        super().commit(start, features, tokens)
        self._root_token = tokens[-1]

    def root(self) -> None:
        self._begin([()])

    def root_logits(self) -> Tensor:
        self.root()
        block = self.blocks[0]
        return block.forward.linked(self.head, RowQuery(block.row, block.root))

    def short(self, paths: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Return the paths that leave space in a block to predict more."""
        return [tuple(path) for path in paths if len(path) < self.head.depth]

    def ends(self, paths: Sequence[Sequence[int]]) -> list[int]:
        """Return new nodes at the end of the paths, -1 where there is no block."""
        wanted = [tuple(path) for path in paths]
        number = {block.known: index for index, block in enumerate(self.blocks)}
        return [
            (self._add(number[path], len(path), path[-1]) if path else 0) if path in number else -1 for path in wanted
        ]

    def extend(self, parents: list[int], tokens: list[int]) -> tuple[list[int], Tensor | None]:
        nodes = self.nodes
        added = [
            self._add(nodes.block[parent], nodes.depth[parent] + 1, token)
            for parent, token in zip(parents, tokens, strict=True)
        ]
        return added, None

    def rank(self, ranking: Ranking, nodes: list[int], logits: Tensor | None, positions: list[int]) -> Candidates:
        found: list[Following] = [([], [])] * len(nodes)
        asked: dict[BlockForward, dict[int, RowQuery]] = {}
        for place, node in enumerate(nodes):
            block, depth, token = self.blocks[self.nodes.block[node]], self.nodes.depth[node], self.nodes.token[node]
            if (row := depth - len(block.known)) < block.rows:
                one = RowQuery(block.row + row, token if row else block.root)
                asked.setdefault(block.forward, {})[place] = one
        for forward, some in asked.items():
            for place, following in zip(some, forward.following(self.head, ranking, [*some.values()]), strict=True):
                found[place] = following
        return Candidates([tokens for tokens, _ in found], [probs for _, probs in found])

    @property
    def forwards(self) -> list[BlockForward]:
        """The forwards that computed its blocks."""
        return list(dict.fromkeys(block.forward for block in self.blocks))

    def room(self) -> int:
        return 1 << 20

    def clear(self) -> None:
        self.blocks, self.nodes = [], _Nodes()

    def close(self) -> None:
        if self.cache is not None:
            self.cache.release()

    def _add(self, block: int, depth: int, token: int) -> int:
        self.nodes.block.append(block)
        self.nodes.depth.append(depth)
        self.nodes.token.append(token)
        return len(self.nodes.token) - 1

    # Its blocks' forward.

    def _begin(self, paths: list[tuple[int, ...]]) -> None:
        begin([(self, paths)])

    def lacking(self, paths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the `paths` that no block starts with yet, and the root if there is no block; as far as there is
        space.
        """
        if not self.blocks:
            paths = [(), *paths]  # the first block is the root's
        there = {block.known for block in self.blocks}
        return [path for path in dict.fromkeys(paths) if path not in there][: _BLOCKS - len(self.blocks)]

    def tokens(self, paths: list[tuple[int, ...]]) -> list[int]:
        """Return [blocks * size]: the tokens of blocks that begin with the root and these, `UNKNOWN` after them."""
        begins = [(self._root_token, *path)[: self.head.size] for path in paths]
        return [token for known in begins for token in (*known, *[UNKNOWN] * (self.head.size - len(known)))]

    def computed(self, paths: list[tuple[int, ...]]) -> Tensor:
        """Compute [blocks * size, hidden], the states of the blocks' rows, for this session alone."""
        head, count = self.head, len(paths)
        tokens = torch.tensor(self.tokens(paths), device=head.device)
        x = head.entered(self.last.expand(len(tokens), -1), tokens)
        own = torch.ones(head.size, head.size, dtype=torch.bool, device=head.device)
        own = torch.block_diag(*[own.tril() if head.causal else own] * count).bool()
        mask = torch.cat([own.new_ones(len(x), self.slots), own], dim=1)
        positions = torch.tensor(self.positions(count), device=head.device)
        x = x if head.entry is None else head.entry(x)
        return head.forward(x, tokens, positions, self.caches, self.slots, mask)

    def positions(self, count: int) -> list[int]:
        """Return the positions of the rows of `count` blocks."""
        return list(range(self.synced, self.synced + self.head.size)) * count

    def rows(self, paths: list[tuple[int, ...]], more: int = 0) -> Rows:
        """Return the blocks' rows, for the stack. A row sees the context and its block, or only the block's rows up to
        it. more: positions by which the text may have grown before.
        """
        assert self.cache is not None
        size, count, first = self.head.size, len(paths), self.slots + more
        blocks = [list(range(at, at + size)) for at in range(first, first + size * count, size)]
        sees = [block[: row + 1] if self.head.causal else block for block in blocks for row in range(size)]
        n = size * count
        positions = [position + more for position in self.positions(count)]
        return Rows(self.cache, first, self.tokens(paths), positions, [first] * n, sees)

    def above(self) -> int:
        """Return the slot of the pool that keeps the last position's context vector."""
        assert self.cache is not None
        return int(self.cache.places(self.slots - 1, 1)[0])

    def add(self, paths: list[tuple[int, ...]], outputs: Outputs) -> None:
        """Add blocks. outputs: of the rows after the known tokens."""
        head = self.head
        ends = list(accumulate(len(head.predicting(path)) for path in paths))
        roots = [path[-1] if path else self._root_token for path in paths]
        positions = [self.synced + 1 + len(path) + row for path in paths for row in range(len(head.predicting(path)))]
        forward = BlockForward(outputs, positions, head.candidates)
        self.blocks += [
            _Block(root, path, forward, first, end - first)
            for root, path, first, end in zip(roots, paths, [0, *ends[:-1]], ends, strict=True)
        ]

    def places(self, count: int) -> Int:
        """Return [count]: places in the pool of the next slots."""
        assert self.cache is not None
        return self.cache.places(self.slots, count)

    def unread(self) -> tuple[Tensor, list[int]] | None:
        """Return the features not read yet, [n, layers, hidden], and their positions; None if there are none."""
        if not self._unread:
            return None
        positions = [position for start, _, tokens in self._unread for position in range(start, start + len(tokens))]
        parts = [features for _, features, _ in self._unread]
        return parts[0] if len(parts) == 1 else torch.cat(parts), positions

    def read(self, features: Tensor, positions: list[int]) -> None:
        """Read features into this session's caches alone."""
        for at in range(0, len(positions), _SYNC_CHUNK):
            context = self.head.fuse(features[at : at + _SYNC_CHUNK].to(self.head.device))
            places = torch.tensor(positions[at : at + _SYNC_CHUNK], device=self.head.device)
            for layer, cache in zip(self.head.layers, self.caches, strict=True):
                layer.read(context, places, cache, self.slots + at)
        self.last = context[-1].clone()
        self.has_read(len(positions))

    def has_read(self, count: int) -> None:
        """Note that all features are read: their keys and values are in the next `count` slots."""
        self._unread.clear()
        self.slots += count


def begin(asked: Sequence[tuple[BlockSession, list[tuple[int, ...]]]]) -> None:
    """Compute blocks for the roots of several sessions, starting with these paths, in one forward; existing blocks are
    not computed again.
    """
    head = asked[0][0].head
    _read(head, [session for session, _ in asked])
    new = [(session, lacking) for session, paths in asked if (lacking := session.lacking(paths))]
    if not new:
        return
    starts, kept = accumulate((len(paths) * head.size for _, paths in new), initial=0), []
    for (_, paths), start in zip(new, starts, strict=False):
        kept.append([start + i * head.size + row for i, path in enumerate(paths) for row in head.predicting(path)])
    chosen = [row for rows in kept for row in rows]
    if head.stack is None:
        multiplied = head.multiplied(torch.cat([session.computed(paths) for session, paths in new])[chosen])
    else:
        above = [session.above() for session, paths in new for _ in range(len(paths) * head.size)]
        multiplied = head.stack.run(above, [session.rows(paths) for session, paths in new], chosen)
    for (session, paths), outputs in zip(new, head.outputs(multiplied).split(list(map(len, kept))), strict=True):
        session.add(paths, outputs)


def _read(head: BlockWeights, sessions: Sequence[BlockSession]) -> None:
    """Read the features that have arrived, for all sessions together where the head has a program for it."""
    unread = [(session, *pending) for session in sessions if (pending := session.unread()) is not None]
    if head.reader is None:
        for session, features, positions in unread:
            session.read(features, positions)
    elif unread:
        places = np.concatenate([session.places(len(positions)) for session, _, positions in unread])
        features = torch.cat([features for _, features, _ in unread]).flatten(1)
        head.reader.read(features, [at for _, _, positions in unread for at in positions], places)
        for session, _, positions in unread:
            session.has_read(len(positions))

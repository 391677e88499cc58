"""The session of one-pass heads: every tree hangs on a *block*, the rows behind one place of the text.

The context's keys and values fill the first cache slots, one for each position whose features are known. A block's rows
come behind them and are dropped with the next features. All blocks that are wanted at once are one forward.

A block is turned into a table: for each depth, the likeliest tokens by the rows alone, and behind each of those what
may follow it, with the link from it. To grow a tree is then to look things up. Where the head says how much of the
target's probability its own covers (confidence c), the chance of a token is c * q: their common mass, shared out as q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.growth import Candidates
from drafters.head import Session
from drafters.outcomes import Following
from drafters.ranking import Ranking

if TYPE_CHECKING:
    from drafters.block import BlockHead

_SYNC_CHUNK = 512  # positions of the context that are read at once
_CANDIDATES = 48  # of each row, from which and to which links are computed
_BLOCKS = 64  # behind one synced text, at most


@dataclass
class _Block:
    """known: the tokens behind the root that it begins with. states: [size, hidden]."""

    root: int
    known: tuple[int, ...]
    states: Tensor
    table: list[dict[int, Following]] | None = None
    """By depth from len(known) on: token before -> what follows it. The first holds one entry."""


@dataclass
class _Nodes:
    """Parallel lists; node 0 is the root. A node's tokens are behind it in the block."""

    block: list[int] = field(default_factory=lambda: [0])
    depth: list[int] = field(default_factory=lambda: [0])
    token: list[int] = field(default_factory=lambda: [-1])


class BlockSession(Session):
    def __init__(self, head: BlockHead, capacity: int):
        self.head, self.depth_limit = head, head.depth
        self.text = capacity
        self.caches = head.new_caches(capacity + _BLOCKS * head.size)
        self.slots = 0
        self.last = torch.empty(0)  # the last position's context vector
        self.blocks: list[_Block] = []
        self.nodes = _Nodes()
        self._pending: list[tuple[int, Tensor, list[int]]] = []
        self._root_token = -1

    def commit(self, start: int, features: Tensor | None, tokens: list[int]) -> None:
        assert features is not None
        self._pending.append((start, features, tokens))
        self.synced, self._root_token = start + len(tokens), tokens[-1]
        self.clear()

    def behind(self) -> int:
        return sum(len(tokens) for _, _, tokens in self._pending)

    def root(self) -> None:
        self._begin([()])

    def root_logits(self) -> Tensor:
        self.root()
        return self._linked(self.blocks[0])

    def begin(self, paths: Sequence[Sequence[int]]) -> list[int]:
        """A node at the end of each path behind the root, with a block that begins with the path."""
        wanted = [tuple(path) for path in paths]
        self._begin([path for path in dict.fromkeys(wanted) if len(path) < self.head.depth])
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
        found = [self._following(ranking, node) for node in nodes]
        return Candidates([tokens for tokens, _ in found], [chances for _, chances in found])

    def room(self) -> int:
        return 1 << 20

    def clear(self) -> None:
        self.blocks, self.nodes = [], _Nodes()

    def _add(self, block: int, depth: int, token: int) -> int:
        self.nodes.block.append(block)
        self.nodes.depth.append(depth)
        self.nodes.token.append(token)
        return len(self.nodes.token) - 1

    # The forward.

    def _begin(self, paths: list[tuple[int, ...]]) -> None:
        """Blocks behind the root, each beginning with one of `paths`; what is there already is not computed again."""
        self._sync()
        if not self.blocks and () not in paths:
            paths = [(), *paths]
        there = {block.known for block in self.blocks}
        new = [path for path in paths if path not in there][: _BLOCKS - len(self.blocks)]
        if not new:
            return
        head, size, count = self.head, self.head.size, len(new)
        offsets = torch.arange(size, device=head.device)
        tokens = torch.full((count, size), -1, dtype=torch.long)
        for row, path in enumerate(new):
            tokens[row, : len(path) + 1] = torch.tensor([self._root_token, *path[: size - 1]])
        tokens = tokens.to(head.device)
        x = torch.where((tokens < 0)[..., None], head.mask, head.embedding[tokens.clamp(min=0)]).flatten(0, 1)
        if head.entry is not None:
            x = head.entry(torch.cat([x, self.last.expand_as(x)], dim=1))
        own = torch.ones(size, size, dtype=torch.bool, device=head.device)
        own = torch.block_diag(*[own.tril() if head.causal else own] * count).bool()
        mask = torch.cat([own.new_ones(count * size, self.slots), own], dim=1)
        states = head.forward(x, (self.synced + offsets).repeat(count), self.caches, self.slots, mask)
        self.blocks += [
            _Block(path[-1] if path else self._root_token, path, rows)
            for path, rows in zip(new, states.unflatten(0, (count, size)), strict=True)
        ]

    def _sync(self) -> None:
        """Read the features that have come."""
        for start, features, tokens in self._pending:
            for at in range(0, len(tokens), _SYNC_CHUNK):
                chunk = features[at : at + _SYNC_CHUNK]
                context = self.head.fuse(chunk)
                positions = torch.arange(start + at, start + at + len(chunk), device=self.head.device)
                for layer, cache in zip(self.head.layers, self.caches, strict=True):
                    layer.read(context, positions, cache, self.slots)
                self.slots += len(chunk)
                self.last = context[-1]
        self._pending.clear()

    # What it says.

    def _linked(self, block: _Block) -> Tensor:
        """[1, draft_vocab]: logits of the token behind what is known."""
        head, row = self.head, self.head.first + len(block.known)
        state = block.states[row : row + 1]
        logits = head.lm_head(state)
        if head.link is not None:
            token = torch.tensor([[block.root]], device=head.device)
            logits = logits + head.link.product(head.link(state, token)[0])
        return logits

    def _following(self, ranking: Ranking, node: int) -> Following:
        block, depth, token = self.blocks[self.nodes.block[node]], self.nodes.depth[node], self.nodes.token[node]
        if block.table is None:
            block.table = self._table(ranking, block)
        place = depth - len(block.known)
        if place == 0:
            return block.table[0][block.root]
        if place >= len(block.table):
            return [], []
        rows = block.table[place]
        # behind a token that the rows did not think of: what they say without a link
        return rows[token] if token in rows else rows[-1]

    def _table(self, ranking: Ranking, block: _Block) -> list[dict[int, Following]]:
        head, known = self.head, len(block.known)
        states = block.states[head.first + known :]
        logits = head.lm_head(states)
        if (
            head.link is not None
        ):  # the token before the first row is known: its link is taken over the whole vocabulary
            token = torch.tensor([[block.root]], device=head.device)
            logits[:1] += head.link.product(head.link(states[:1], token)[0])
        scores = ranking.scores(logits, [self.synced + 1 + known + row for row in range(len(states))])
        top = scores.topk(min(_CANDIDATES, scores.shape[1]))
        ids = head.target_ids[top.indices]
        peak = top.values[:, :1]
        total, likely = (scores - peak).exp().sum(-1), (top.values - peak).exp()
        rest = (total - likely.sum(-1)).clamp(min=0)
        sure = self._sure(states, block.root, ids)
        alone = (likely / total[:, None] * sure.mean(1, keepdim=True))[:, : ranking.top_k]
        single = Candidates(ids[:, : ranking.top_k].tolist(), alone.tolist())
        table: list[dict[int, Following]] = [
            {block.root if row == 0 else -1: (tokens, chances)}
            for row, (tokens, chances) in enumerate(zip(single.tokens, single.chance, strict=True))
        ]
        if head.link is None or len(states) == 1:
            return table
        before = ids[:-1]  # [rows - 1, candidates], the tokens that the later rows may follow
        second = head.link.second[top.indices[1:]]
        link = (head.link(states[1:], before) @ second.transpose(1, 2)).float() * ranking.gain
        linked = top.values[1:, None] + link - peak[1:, None]
        best = linked.topk(ranking.top_k)
        chance = best.values.exp() / (linked.exp().sum(-1) + rest[1:, None])[..., None]
        chance *= sure[1:, :, None]
        tokens = ids[1:, None].expand(-1, link.shape[1], -1).gather(2, best.indices)
        for row, (names, followers, chances) in enumerate(
            zip(before.tolist(), tokens.tolist(), chance.tolist(), strict=True)
        ):
            table[row + 1] |= dict(zip(names, zip(followers, chances, strict=True), strict=True))
        return table

    def _sure(self, states: Tensor, root: int, ids: Tensor) -> Tensor:
        """[rows, candidates]: the confidence in each row behind each candidate of the row before, 1 where none is said.
        ids: [rows, candidates], the target's. Behind the root there is but one, repeated.
        """
        before = torch.cat([torch.full_like(ids[:1], root), ids[:-1]])
        said = self.head.chance_of_overlap(states, before)
        return torch.ones(ids.shape, device=ids.device) if said is None else said

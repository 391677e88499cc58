"""The token tree: what every drafter returns, messages carry and the verifier consumes.

Flat arrays in topological order (a parent stands before its children); the root, node 0, is the last committed
token. Trees are immutable: merging and pruning return new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.core.errors import ProtocolError

Int = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Candidate continuations of the text that ends in the root token.

    tokens: [nodes] int32, token ids. parents: [nodes] int32, -1 for the root.
    confidence: [nodes] float32, path confidence c(v): the estimated probability that every token from the root to
    the node is accepted; 1 at the root and never larger than the parent's.
    source: [nodes] uint32, the drafters that proposed the node, one bit each (`marked`); 0 for the root.
    """

    tokens: Int
    parents: Int
    confidence: NDArray[np.float32]
    source: NDArray[np.uint32]

    @classmethod
    @lru_cache(4096)  # several are needed per request and round without a draft
    def root_only(cls, token: int) -> TokenTree:
        """Return a tree that drafts nothing: verifying it is plain decoding."""
        return cls.from_lists([token], [-1], [1.0])

    @classmethod
    def from_lists(
        cls, tokens: Sequence[int], parents: Sequence[int], confidence: Sequence[float], source: int = 0
    ) -> TokenTree:
        """Return a tree from parallel lists, every node below the root marked with the bit set `source`."""
        bits = np.full(len(tokens), source, dtype=np.uint32)
        bits[0] = 0
        return cls(
            np.asarray(tokens, dtype=np.int32),
            np.asarray(parents, dtype=np.int32),
            np.asarray(confidence, dtype=np.float32),
            bits,
        )

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int], confidence: Iterable[float], source: int = 0) -> TokenTree:
        """Return a single branch below `root`."""
        n = len(tokens)
        return cls.from_lists([root, *tokens], list(range(-1, n)), [1.0, *confidence], source)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> Int:
        """[nodes] int32, distance from the root; position ids are the root's position plus this."""
        depths = [0] * len(self)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                depths[node] = depths[parent] + 1
        return np.asarray(depths, dtype=np.int32)

    @cached_property
    def ancestor_mask(self) -> NDArray[np.bool_]:
        """[nodes, nodes] bool: row v is true at v and at v's ancestors, the nodes that v may attend to."""
        rows: list[int] = []  # as bits of integers, four times as fast as array rows
        for node, parent in enumerate(self.parents.tolist()):
            rows.append(1 << node | (rows[parent] if parent >= 0 else 0))
        n, width = len(rows), (len(rows) + 7) // 8
        packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), np.uint8)
        return np.unpackbits(packed.reshape(n, width), axis=1, count=n, bitorder="little").view(np.bool_)

    @cached_property
    def _child_of(self) -> dict[tuple[int, int], int]:
        return {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))
        }

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that carries `token`, if the tree has it."""
        return self._child_of.get((node, token))

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes from the root on, each the child that carries the token of the one before.
        tokens: [nodes].
        """
        path: list[int] = []
        node: int | None = 0
        while node is not None:
            path.append(node)
            node = self.child(node, tokens[node])
        return path

    def children(self, node: int) -> list[int]:
        """Return the children of `node` in the order they were drafted."""
        return [int(child) for child in np.flatnonzero(self.parents == node)]

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Return the tokens of `path(node)`."""
        return [int(token) for token in self.tokens[self.path(node)]]

    def keep(self, nodes: ArrayLike) -> TokenTree:
        """Return the tree of `nodes` alone, which must include the root and each node's parent."""
        kept = np.sort(np.asarray(nodes, dtype=np.int64))
        new_index = np.full(len(self) + 1, -1, dtype=np.int32)  # the last entry maps the root's parent, -1
        new_index[kept] = np.arange(len(kept), dtype=np.int32)
        return TokenTree(self.tokens[kept], new_index[self.parents[kept]], self.confidence[kept], self.source[kept])

    def prune(self, budget: int) -> TokenTree:
        """Keep the `budget` most confident nodes (root included, at least the root); the earlier of two equals wins.

        Confidence never grows along a path and parents come first, so every kept node's ancestors are kept too.
        """
        if len(self) <= budget:
            return self
        return self.keep(np.argsort(-self.confidence, kind="stable")[: max(budget, 1)])

    def union(self, other: TokenTree) -> TokenTree:
        """Return the trie merge of two trees over the same root.

        A node that both propose is accepted unless both are wrong: the probabilities of its last step, c(v)/c(parent),
        combine as 1 - (1 - p)(1 - q), and its source bits are merged.
        """
        if self.tokens[0] != other.tokens[0]:
            raise ValueError(f"trees of different roots: {self.tokens[0]} and {other.tokens[0]}")
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        step, source = _steps(self), self.source.tolist()
        index = dict(self._child_of)
        merged = [0] * len(other)
        for node, prob in enumerate(_steps(other)[1:], start=1):
            token, parent = int(other.tokens[node]), merged[other.parents[node]]
            known = index.get((parent, token))
            if known is None:
                known = index[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                step.append(prob)
                source.append(0)
            else:
                step[known] = 1 - (1 - step[known]) * (1 - prob)
            source[known] |= int(other.source[node])
            merged[node] = known
        confidence = [1.0] * len(tokens)
        for node in range(1, len(tokens)):
            confidence[node] = confidence[parents[node]] * step[node]
        tree = TokenTree.from_lists(tokens, parents, confidence)
        return TokenTree(tree.tokens, tree.parents, tree.confidence, np.asarray(source, dtype=np.uint32))

    def marked(self, source: int) -> TokenTree:
        """Set the bit `source` on every node below the root that names no drafter yet."""
        bits = np.where(self.source == 0, np.uint32(source), self.source)
        bits[0] = 0
        return TokenTree(self.tokens, self.parents, self.confidence, bits)

    def grafted(self, tokens: Sequence[int], prob: float) -> TokenTree:
        """Return the tree with the chain of `tokens` below its root: nodes that it already has stay as they are, new
        ones are appended. prob: of each new token.
        """
        if not tokens:
            return self
        confidence, parents, node = self.confidence.tolist(), self.parents.tolist(), 0
        new: list[int] = []
        for token in tokens:
            below = None if new else self.child(node, token)
            if below is None:
                below = len(parents)
                new.append(token)
                parents.append(node)
                confidence.append(confidence[node] * prob)
            node = below
        if not new:
            return self
        return TokenTree(
            np.append(self.tokens, np.asarray(new, np.int32)),
            np.asarray(parents, np.int32),
            np.asarray(confidence, np.float32),
            np.append(self.source, np.zeros(len(new), np.uint32)),
        )

    def validate(self, vocab_size: int) -> TokenTree:
        """Return the tree itself if it is well formed; trees from another process must be checked.

        Raises ProtocolError for an empty tree, arrays of different lengths, a parent that does not precede its child,
        two equal siblings, a token outside the vocabulary or a confidence that is not a path confidence.
        """
        n = len(self)
        if n == 0 or not n == len(self.parents) == len(self.confidence) == len(self.source):
            raise ProtocolError(f"tree arrays of lengths {n}, {len(self.parents)}, {len(self.confidence)}")
        tokens, parents, confidence = self.tokens.tolist(), self.parents.tolist(), self.confidence.tolist()
        if parents[0] != -1 or not all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1)):
            raise ProtocolError("tree parents are not in topological order")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ProtocolError(f"tree token outside the vocabulary of {vocab_size}")
        below = zip(confidence[1:], parents[1:], strict=True)
        if confidence[0] != 1 or not all(0 <= prob <= confidence[parent] for prob, parent in below):
            raise ProtocolError("tree confidence is not a path confidence")
        if len(self._child_of) != n:
            raise ProtocolError("tree has two equal siblings")
        return self


def _steps(tree: TokenTree) -> list[float]:
    """Return c(v)/c(parent(v)) of every node: the probability of its last step given the rest of its path."""
    above = tree.confidence[np.maximum(tree.parents, 0)]
    steps = np.divide(tree.confidence, above, out=np.zeros(len(tree), np.float32), where=above > 0)
    return [float(step) for step in steps]

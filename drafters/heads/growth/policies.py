"""Growth policies: which draft nodes a tree gets, independent of the head that predicts them.

A policy is a generator: it yields a `Frontier` of nodes to expand, is sent the `Candidates` that a head predicts
after them, and returns the finished `TokenTree`. So the head never knows the policy, and several trees can grow in
lockstep in the same forward passes. A one-pass head answers from the rows of its single forward.
A budget counts every node that is verified, the root included.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter

from engine.config import DrafterConfig
from engine.core.errors import ConfigError
from engine.core.tree import TokenTree

Path = tuple[int, ...]

# EAGLE-1 (arXiv 2401.15077), 25 nodes, and Medusa (arXiv 2401.10774), 63 nodes, as published: child ranks from the root
EAGLE_25: tuple[Path, ...] = (
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (0, 0, 0), (0, 0, 1),
    (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip
MEDUSA_63: tuple[Path, ...] = (
    (0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2), (3,), (0, 3), (4,), (0, 4), (2, 0), (0, 5), (0, 0, 1),
    (5,), (0, 6), (6,), (0, 7), (0, 1, 0), (1, 1), (7,), (0, 8), (0, 0, 2), (3, 0), (0, 9), (8,), (9,), (1, 0, 0),
    (0, 2, 0), (1, 2), (0, 0, 3), (4, 0), (2, 1), (0, 0, 4), (0, 0, 5), (0, 0, 0, 0), (0, 1, 1), (0, 0, 6), (0, 3, 0),
    (5, 0), (1, 3), (0, 0, 7), (0, 0, 8), (0, 0, 9), (6, 0), (0, 4, 0), (1, 4), (7, 0), (0, 1, 2), (2, 0, 0), (3, 1),
    (2, 2), (8, 0), (0, 5, 0), (1, 5), (1, 0, 1), (0, 2, 1), (9, 0), (0, 6, 0), (0, 0, 0, 1), (1, 6), (0, 7, 0),
)  # fmt: skip
STATIC_TREES = {"eagle_25": EAGLE_25, "medusa_63": MEDUSA_63}


@dataclass(frozen=True)
class Frontier:
    """Nodes to expand, all of them drafted before.

    nodes, parents: indices in the tree under construction, the root is 0 and its parent -1. tokens: the nodes' own.
    confidence: their c(v). builder: that tree.
    """

    nodes: list[int]
    parents: list[int]
    tokens: list[int]
    confidence: list[float]
    builder: TreeBuilder


@dataclass(frozen=True)
class Candidates:
    """What may follow each frontier node, likeliest first.

    tokens: [frontier, k]. prob: [frontier, k], the probability that the token is accepted if its parent was. Rows
    may be shorter, or empty where a head predicts no further.
    """

    tokens: list[list[int]]
    prob: list[list[float]]


Child = tuple[float, int, int]
"""A candidate: path confidence, parent, token."""
Steps = Generator[Frontier, Candidates, TokenTree]


@dataclass
class TreeBuilder:
    """A tree under construction: parallel lists in topological order."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    confidence: list[float] = field(default_factory=lambda: [1.0])

    def add(self, parent: int, token: int, confidence: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(confidence)
        return len(self.tokens) - 1

    def add_all(self, children: Sequence[Child]) -> list[int]:
        """Add the nodes, and return their numbers in order."""
        first = len(self.tokens)
        self.confidence += [confidence for confidence, _, _ in children]
        self.parents += [parent for _, parent, _ in children]
        self.tokens += [token for _, _, token in children]
        return list(range(first, len(self.tokens)))

    def frontier(self, nodes: list[int]) -> Frontier:
        parents, tokens, confidence = self.parents, self.tokens, self.confidence
        return Frontier(
            nodes, [parents[n] for n in nodes], [tokens[n] for n in nodes], [confidence[n] for n in nodes], self
        )

    def tree(self) -> TokenTree:
        return TokenTree.from_lists(self.tokens, self.parents, self.confidence)

    def best(self, frontier: Sequence[int], seen: Candidates) -> float:
        """Return the path confidence of the best candidate, 0 if there is none."""
        first = (self.confidence[n] * probs[0] for n, probs in zip(frontier, seen.prob, strict=True) if probs)
        return max(first, default=0.0)

    def children(self, frontier: Sequence[int], seen: Candidates, least: float = 0.0) -> list[Child]:
        """Return every candidate of at least that path confidence, best first; ties in order of discovery."""
        found: list[Child] = []
        for node, tokens, probs in zip(frontier, seen.tokens, seen.prob, strict=True):
            above = self.confidence[node]
            for token, prob in zip(tokens, probs, strict=True):
                if not (confidence := above * prob) >= least:  # also true for NaN
                    break  # the others are less likely
                found.append((confidence, node, token))
        return sorted(found, key=itemgetter(0), reverse=True)


class Policy(ABC):
    """How a tree grows. budget: maximum nodes, root included. top_k: candidates wanted after each node.

    max_expansions: the most nodes it yields in one growth, for which a head must have room. row_tokens: what verifying
    one more node costs at present, in tokens, by the verifier's cost model; None if that is unknown. depth: the most
    layers below the root's candidates that a GPU drafts before they are asked for, the best `top_k` nodes of each; 0
    where the policy expands others.
    """

    depth: int = 0
    budget: int
    top_k: int
    max_expansions: int
    row_tokens: float | None = None

    @abstractmethod
    def steps(self, root: int) -> Steps:
        """Grow a tree below the token `root`."""


class Static(Policy):
    """Grows the same tree every time, given by child ranks along each path (EAGLE-1, Medusa, Token Recycling)."""

    def __init__(self, paths: Sequence[Sequence[int]] = EAGLE_25):
        self.paths = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        missing = [path for path in self.paths if len(path) > 1 and path[:-1] not in self.paths]
        if missing or not all(self.paths):
            raise ValueError(f"static tree: path {list(missing[0]) if missing else []} has no parent in the list")
        self.budget = len(self.paths) + 1
        self.top_k = 1 + max(rank for path in self.paths for rank in path)
        self.max_expansions = len({path[:-1] for path in self.paths})

    def steps(self, root: int) -> Steps:
        builder = TreeBuilder([root])
        node_of: dict[Path, int] = {(): 0}
        for depth in range(1, len(self.paths[-1]) + 1):
            layer = [path for path in self.paths if len(path) == depth and path[:-1] in node_of]
            above = list(dict.fromkeys(path[:-1] for path in layer))
            if not above:
                break
            seen = yield builder.frontier([node_of[path] for path in above])
            rows = {path: row for row, path in enumerate(above)}
            for path in layer:
                row, rank = rows[path[:-1]], path[-1]
                if rank < len(seen.tokens[row]):
                    parent = node_of[path[:-1]]
                    confidence = builder.confidence[parent] * seen.prob[row][rank]
                    node_of[path] = builder.add(parent, seen.tokens[row][rank], confidence)
        return builder.tree()


class Dynamic(Policy):
    """EAGLE-2 (arXiv 2406.16858, section 4): expand the best `top_k` nodes of each layer, then keep the best of all.

    depth: layers drafted below the root's own candidates, as the published code counts it, so paths have up to
    depth + 1 drafted tokens. Every candidate ever seen takes part in the final ranking, expanded or not. One that is
    not among the best `budget` when it is seen never will be, nor will its descendants, so it is dropped at once: the
    tree is the same, in a fraction of the steps and the time.
    """

    def __init__(self, depth: int = 7, top_k: int = 10, budget: int = 60):
        self.depth, self.top_k, self.budget = depth, top_k, budget
        self.max_expansions = 1 + depth * top_k

    def steps(self, root: int) -> Steps:
        return _best_of_all(self, root, self.depth + 1)


def _best_of_all(policy: Policy, root: int, layers: int, floor: float = 0.0) -> Steps:
    """Grow a tree of the best `budget` nodes. The best `top_k` of a layer are expanded as long as they may have
    children among these. floor: the confidence that a node needs to be expanded, and a node below the first layer to be
    in the tree.
    """
    builder, frontier, room = TreeBuilder([root]), [0], policy.max_expansions
    best = [0.0] * (policy.budget - 1)  # a heap of the greatest confidences
    for depth in range(layers):
        seen = yield builder.frontier(frontier)
        room -= len(frontier)
        least = floor if depth else 0.0
        layer = builder.add_all(_entered(best, builder.children(frontier, seen, max(least, best[0] if best else inf))))
        # A child is never more confident than its parent.
        frontier = [n for n in layer[: min(policy.top_k, room)] if floor <= builder.confidence[n] > best[0]]
        if not frontier:
            break
    return builder.tree().prune(policy.budget)


def _entered(best: list[float], children: list[Child]) -> list[Child]:
    """Return the children, given best first, that are among the best ones; these are a heap, which is updated."""
    for count, (confidence, _, _) in enumerate(children):
        if confidence <= best[0]:
            return children[:count]
        heapq.heapreplace(best, confidence)
    return children


class TalonPaperPolicy(Policy):
    """TALON (arXiv 2601.07353) to the letter, equations 2-5 and algorithm 2.

    The pool of a layer is every child of every node of the layer before. The first layer keeps its best `width`; a
    deeper one keeps what reaches `mu` times the pool's best; a layer that does not fit keeps its best.
    Growth ends only at `budget` nodes, root included, so the layer that is cut is verified and never expanded.
    """

    def __init__(self, budget: int = 60, width: int = 10, mu: float = 0.03):
        self.budget, self.width, self.mu = budget, width, mu
        self.top_k = budget - 1  # no node can keep more children than that, so this is as good as all of them
        self.max_expansions = budget

    def steps(self, root: int) -> Steps:
        builder, frontier, depth = TreeBuilder([root]), [0], 0
        while len(builder.tokens) < self.budget:
            seen = yield builder.frontier(frontier)
            pool = builder.children(frontier, seen, self.mu * builder.best(frontier, seen) if depth else 0.0)
            if not pool:  # the head predicts no further
                break
            frontier = builder.add_all(pool[: None if depth else self.width][: self.budget - len(builder.tokens)])
            depth += 1
        return builder.tree()


class Adaptive(Policy):
    """Our variant of TALON's rule: the gate applies to c(v) itself, and growth stops when nothing passes it.

    Layer 0 takes the best `top_k` ungated. A deeper candidate passes if c(v) >= mu; `top_k` candidates of each node are
    considered. So size, depth and width follow the head's confidence. Where a row costs less than mu, as on a GPU, its
    cost is the gate: trees then grow to the budget. Where it costs more than twice as much, half of its cost is: nodes
    below are not verified. As in `Dynamic`, a full tree takes better nodes in place of its worst, and the best `top_k`
    of a layer are expanded as long as they may have such children. Trees may be deeper than `depth`.
    """

    def __init__(self, budget: int = 60, top_k: int = 10, mu: float = 0.03, depth: int = 7):
        self.budget, self.top_k, self.mu, self.depth = budget, top_k, mu, depth
        self.max_expansions = 4 * budget  # leaves space for deep trees beside wide ones

    def steps(self, root: int) -> Steps:
        return _best_of_all(self, root, self.budget, self._floor)

    @property
    def _floor(self) -> float:
        """The confidence that a node needs."""
        return self.mu if self.row_tokens is None else max(min(self.mu, self.row_tokens), self.row_tokens / 2)


def policy_of(options: DrafterConfig, published: Policy, default: str = "adaptive") -> Policy:
    """Return the growth policy that a configuration describes. published: the one of the method's paper; default: the
    policy where the configuration names none. ConfigError if its trees are larger than the budget, which the verifier
    would refuse.
    """
    policy = _named(options, published, options.growth.policy or default)
    if policy.budget > options.budget:
        raise ConfigError(
            f"drafter.budget={options.budget}: the trees of drafter.growth.policy={options.growth.policy} have "
            f"{policy.budget} nodes: set drafter.budget={policy.budget}"
        )
    return policy


def _named(options: DrafterConfig, published: Policy, name: str) -> Policy:
    growth = options.growth
    if name == "static":
        return Static(STATIC_TREES[growth.tree])
    if name == "dynamic":
        return Dynamic(growth.depth, growth.top_k, options.budget)
    if name == "talon":
        return TalonPaperPolicy(options.budget, growth.top_k, growth.mu)
    if name == "adaptive":
        return Adaptive(options.budget, growth.top_k, growth.mu, growth.depth)
    return published

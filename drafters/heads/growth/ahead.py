"""Drafts whole trees on a GPU in one go, before the policy on the host asks for them.

A policy asks for a layer of nodes, reads what the head predicts after them, and asks for the next: a wait for each
layer. `Dynamic` expands the best nodes of each layer, which the device finds itself. So all layers are launched one
after the other, each with the nodes that the device has selected, and what the head predicted comes to the host once.
It is entered in the requests' tries, where the policy finds all that it asks for. So the policy alone decides what a
tree is: a node that it wants and the device did not select is drafted then, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from drafters.heads.growth.growth_kernel import GrownLayer, select
from drafters.heads.growth.policies import Candidates, Dynamic
from drafters.heads.growth.ranking import Ranking
from drafters.heads.growth.trie import Trie
from engine.core.batch import Rows
from engine.device import downloaded, uploaded


class HeadStep(Protocol):
    """A head's forward over rows whose places are known. size: its rows, with those that pad it. tables: the requests'
    block tables; places: [rows] int64, where in the pool the rows' features are; both on the host.
    """

    size: int

    @property
    def tables(self) -> Tensor: ...
    @property
    def places(self) -> Tensor: ...
    def run(self, tokens: Tensor, read: Tensor, listed: Tensor) -> Tensor:
        """Return the head's outputs of all rows. tokens, read: [size] int64, the rows' tokens and where the features
        are that they enter with; listed: the tables, and the slots that each row sees behind its text.
        """


class HeadSteps(Protocol):
    """The layers of a head on a GPU."""

    def step(self, parts: Sequence[Rows]) -> HeadStep:
        """Prepare a forward over these rows; there is room for them from now on."""


class _Drafted(NamedTuple):
    """A layer as the device has drafted it. parents, tokens: [nodes], of the root's layer none. following, prob:
    [nodes, candidates] what the head predicts after each.
    """

    parents: Tensor
    tokens: Tensor
    following: Tensor
    prob: Tensor


def draft_ahead(stack: HeadSteps, tries: Sequence[Trie], roots: Sequence[Tensor], policy: Dynamic) -> None:
    """Draft all layers below node 0 of each trie, of which nothing has been drafted. roots: the logits after it."""
    layers = _layers(stack, tries, torch.cat([*roots]), policy.depth, policy.top_k)
    parts = iter(downloaded([part for layer in layers for part in layer]))
    read = [_Drafted(*(next(parts) for _ in layer)) for layer in layers]
    for tree, trie in enumerate(tries):
        _enter(trie, tree, len(tries), read)


def _layers(stack: HeadSteps, tries: Sequence[Trie], logits: Tensor, depth: int, width: int) -> list[_Drafted]:
    """Launch all layers and read nothing."""
    sessions: list[Any] = [trie.session for trie in tries]
    firsts = [session.slots + len(session.positions) - 1 for session in sessions]
    for session, first in zip(sessions, firsts, strict=True):
        session.cache.reserve(first + depth * width)
    steps = [
        stack.step([_rows(session, first, layer, width) for session, first in zip(sessions, firsts, strict=True)])
        for layer in range(depth)
    ]
    slots = torch.tensor([[first + layer * width for first in firsts] for layer in range(depth)], dtype=torch.int32)
    roots = torch.tensor([session.places[0] for session in sessions])
    given = [steps[0].tables, slots, roots, *(step.places for step in steps)]
    tables, slots, *places = uploaded(given, logits.device)
    ones = torch.ones(len(tries), dtype=torch.float64, device=logits.device)
    above = GrownLayer(ones, places[0], slots.new_zeros(len(tries), depth))
    nothing = slots.new_empty(0)
    found = [_Drafted(nothing, nothing.long(), *_best(tries, logits, 0))]
    for layer, step in enumerate(steps):
        chosen = select(found[-1].following, found[-1].prob, above, slots[layer], layer, width, step.size)
        listed = torch.cat([tables, chosen.ancestors[:, : layer + 1].flatten()])
        logits = step.run(chosen.tokens, chosen.read, listed)
        above = GrownLayer(chosen.confidence, places[layer + 1], chosen.ancestors)
        tokens = chosen.tokens[: len(chosen.parents)]
        found.append(_Drafted(chosen.parents, tokens, *_best(tries, logits, layer + 1)))
    return found


def _rows(session: Any, first: int, layer: int, width: int) -> Rows:
    """Return a layer's rows of one tree, whose tokens and ancestors the device selects."""
    return Rows(
        session.cache,
        first + layer * width,
        [0] * width,
        [session.positions[0] + 1 + layer] * width,
        [session.slots] * width,
        [[0] * (layer + 1)] * width,
    )


def _best(tries: Sequence[Trie], logits: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Rank what may follow a layer's nodes, the same number of each trie. Returns tokens and their probabilities."""
    rankings = [trie.ranking for trie in tries]
    if all(ranking.sampling.greedy for ranking in rankings):  # by the logits themselves
        return Ranking.best_of_all([(max(rankings, key=lambda ranking: ranking.top_k), logits, [])])
    parts = logits.split(len(logits) // len(tries))
    asked = [
        (trie.ranking, part, [trie.session.synced + 1 + layer] * len(part))
        for trie, part in zip(tries, parts, strict=True)
    ]
    return Ranking.best_of_all(asked)


def _enter(trie: Trie, tree: int, trees: int, layers: Sequence[_Drafted]) -> None:
    """Enter in a trie what was drafted of the tree of that index."""
    session: Any = trie.session
    nodes, columns = [0], trie.ranking.top_k
    for drafted in layers:
        count = len(drafted.following) // trees
        own = slice(tree * count, (tree + 1) * count)
        if len(drafted.parents):
            parents = [nodes[parent] for parent in drafted.parents[own].tolist()]
            tokens = drafted.tokens[own].tolist()
            nodes = list(range(len(session.positions), len(session.positions) + count))
            session.grow(parents, tokens)
            for pair, node in zip(zip(parents, tokens, strict=True), nodes, strict=True):
                trie.child[pair], trie.depth[node] = node, trie.depth[pair[0]] + 1
        following, prob = drafted.following[own, :columns].tolist(), drafted.prob[own, :columns].tolist()
        trie.note(nodes, Candidates(following, prob))

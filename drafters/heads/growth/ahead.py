"""Drafts whole trees on a GPU in one go, before the policy on the host asks for them.

A policy asks for a layer of nodes, reads what the head predicts after them, and asks for the next: a wait for each
layer. Where it expands the best nodes of each layer, the device finds these itself, as far as the head's own
probabilities tell. So all layers are launched one after the other, each with the nodes that the device has selected,
and what the head predicted comes to the host once. It is entered in the requests' tries, where the policy finds what it
asks for. So the host alone decides what a tree is, with its own order of the nodes where retrieval takes part or
probabilities are calibrated: a node that it wants and the device did not select is drafted then, as everywhere.

`draft_behind` launches the same behind the walks of a round (`drafters.heads.growth.behind`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from drafters.heads.growth.behind import DraftsBehind, keys_after, noise_keys
from drafters.heads.growth.growth_kernel import Grounds, TreeLayer, select
from drafters.heads.growth.policies import Candidates, Policy
from drafters.heads.growth.ranking import Ranking
from drafters.heads.growth.trie import Trie
from engine.core.batch import Rows
from engine.core.drafter_protocol import DeviceVerdicts
from engine.device import PackedDownload, uploaded


class HeadStep(Protocol):
    """A head's forward over rows whose places are known. size: its rows, with those that pad it. tables: the requests'
    block tables; places: [rows] int64, where in the pool the rows' features are; given: what `run` takes of rows that
    read their own places. All are on the host.
    """

    size: int

    @property
    def tables(self) -> Tensor: ...
    @property
    def places(self) -> Tensor: ...
    @property
    def given(self) -> Tensor: ...
    def run(self, given: Tensor, listed: Tensor, picked: Tensor | None = None) -> Tensor:
        """Return the head's outputs of the rows picked, or of all. given: see `NextLayer.rows`; listed: the tables, and
        the slots that each row sees behind its text.
        """


class HeadSteps(Protocol):
    """The layers of a head on a GPU."""

    def step(self, parts: Sequence[Rows]) -> HeadStep:
        """Prepare a forward over these rows; there is room for them from now on."""


Keep = Callable[[Tensor, Tensor], None]
"""Lets a head keep the target's features, [rows, layers, hidden], at some places of its pool, [rows] int64."""


class _Drafted(NamedTuple):
    """A layer as the device has drafted it. parents, tokens: [nodes], of the root's layer none. following, prob:
    [nodes, candidates] what the head predicts after each.
    """

    parents: Tensor
    tokens: Tensor
    following: Tensor
    prob: Tensor


class _Steps:
    """The forwards of all layers of some trees, prepared before anything is known of their nodes. They are one more
    than the latest trees asked for. firsts: the slots of their first nodes; ends: upper bounds of how many slots of its
    text each tree sees, and of its root's position.
    """

    def __init__(
        self, stack: HeadSteps, tries: Sequence[Trie], firsts: list[int], ends: list[tuple[int, int]], policy: Policy
    ):
        self.tries, self.width = tries, policy.top_k
        layers = range(min(policy.depth, 1 + max(trie.reach for trie in tries)))
        sessions: list[Any] = [trie.session for trie in tries]
        for session, first in zip(sessions, firsts, strict=True):
            session.cache.reserve(first + len(layers) * self.width)
        parts = [*zip(sessions, firsts, ends, strict=True)]
        self.steps = [
            stack.step([_rows(session.cache, first, end, layer, self.width) for session, first, end in parts])
            for layer in layers
        ]
        slots = [[first + layer * self.width for first in firsts] for layer in layers]
        self.needed = [
            self.steps[0].tables,
            torch.tensor(slots, dtype=torch.int32),
            *(step.places for step in self.steps),
        ]
        """The tensors that have to be on the device before `launch`."""

    def launch(
        self, logits: Tensor, grounds: Grounds, needed: Sequence[Tensor], keys: Tensor | None = None
    ) -> list[Tensor]:
        """Launch all layers and read nothing. logits: after each text. needed: that of `needed`, on the device. keys:
        [layers, trees, width] int64, of the noise after each layer's nodes, where the host does not know their
        positions.
        """
        tables, slots, *places = needed
        width, trees = self.width, len(self.tries)
        ones = torch.ones(trees, dtype=torch.float64, device=logits.device)
        above = TreeLayer(ones, grounds.places, slots.new_zeros(trees, len(self.steps)))
        nothing = slots.new_empty(0)
        found = [_Drafted(nothing, nothing.long(), *self._best(logits, 0, keys))]
        for layer, step in enumerate(self.steps):
            best = found[-1]
            chosen = select(best.following, best.prob, above, grounds, slots[layer], layer, width, step.size)
            listed = torch.cat([tables, chosen.ancestors[:, : layer + 1].flatten()])
            logits = step.run(chosen.rows, listed)
            above = TreeLayer(chosen.confidence, places[layer], chosen.ancestors)
            tokens = chosen.rows[0, : trees * width]
            found.append(_Drafted(chosen.parents, tokens, *self._best(logits, layer + 1, keys)))
        return [part for drafted in found for part in drafted]

    def _best(self, logits: Tensor, layer: int, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rank what may follow a layer's nodes, as many of each trie. Returns tokens and their probabilities."""
        rankings = [trie.ranking for trie in self.tries]
        if all(ranking.sampling.greedy for ranking in rankings):  # by the logits themselves
            return Ranking.best_of_all([(max(rankings, key=lambda ranking: ranking.top_k), logits, [])])
        parts = logits.split(len(logits) // len(rankings))
        asked = [
            (trie.ranking, part, [trie.session.synced + 1 + layer] * len(part))
            for trie, part in zip(self.tries, parts, strict=True)
        ]
        if keys is None:
            return Ranking.best_of_all(asked)
        return Ranking.best_of_all(asked, keys[layer, :, : len(parts[0])].contiguous().flatten())


def draft_ahead(stack: HeadSteps, tries: Sequence[Trie], roots: Sequence[Tensor], policy: Policy) -> None:
    """Draft all layers below node 0 of each trie, of which nothing has been drafted. roots: the logits after it."""
    sessions: list[Any] = [trie.session for trie in tries]
    firsts = [session.first + len(session.positions) - 1 for session in sessions]
    prefixes, positions = [session.slots for session in sessions], [session.positions[0] for session in sessions]
    steps = _Steps(stack, tries, firsts, [*zip(prefixes, positions, strict=True)], policy)
    on_host = torch.tensor([prefixes, positions, [session.places[0] for session in sessions]])
    grounds, *needed = uploaded([on_host, *steps.needed], roots[0].device)
    sent = PackedDownload(steps.launch(torch.cat([*roots]), Grounds(*grounds), needed))
    layers = _layers_of(sent.read())
    for tree, trie in enumerate(tries):
        _enter(trie, tree, len(tries), layers)


def draft_behind(
    stack: HeadSteps, keep: Keep, tries: Sequence[Trie], verdicts: DeviceVerdicts, policy: Policy
) -> DraftsBehind:
    """Let the head read what a round accepts, and draft all layers below that for each trie. The sessions have read all
    of their texts before the round.
    """
    trees, most = verdicts.tokens.shape
    sessions: list[Any] = [trie.session for trie in tries]
    ends = [(session.slots + most, session.synced + most - 1) for session in sessions]
    steps = _Steps(stack, tries, [slots for slots, _ in ends], ends, policy)
    reading = stack.step([session.rows_of(session.synced, [0] * most) for session in sessions])
    before = [
        [tree * most - 1 for tree in range(trees)],
        [session.slots for session in sessions],
        [session.synced - 1 for session in sessions],
    ]
    given, places, ahead_of_walk, keys, *needed = uploaded(
        [reading.given, reading.places, torch.tensor(before), noise_keys(tries, most + policy.depth), *steps.needed],
        verdicts.lengths.device,
    )
    keep(verdicts.features.flatten(0, 1), places)
    given[0, : trees * most] = verdicts.tokens.flatten()
    last, prefixes, positions = (ahead_of_walk + verdicts.lengths).unbind()
    logits = reading.run(given, needed[0], last)
    if keys.numel():
        keys = keys_after(keys, verdicts, len(steps.steps) + 1).T
        keys = keys[..., None].expand(-1, -1, policy.top_k).contiguous()
    grounds = Grounds(prefixes, positions, places.index_select(0, last))

    def enter(came: list[tuple[int, Trie]], found: list[Tensor]) -> None:
        layers = _layers_of(found)
        for tree, trie in came:
            session: Any = trie.session
            session.has_read_behind(most, logits[tree : tree + 1])
            _enter(trie, tree, trees, layers)

    return DraftsBehind(tries, verdicts, steps.launch(logits, grounds, needed, keys), enter)


def _layers_of(parts: Sequence[Tensor]) -> list[_Drafted]:
    each = len(_Drafted._fields)
    return [_Drafted(*parts[at : at + each]) for at in range(0, len(parts), each)]


def _rows(cache: Any, first: int, end: tuple[int, int], layer: int, width: int) -> Rows:
    """Return a layer's rows of one tree, whose tokens and ancestors the device selects. end: see `_Steps`."""
    prefix, position = end
    slot = first + layer * width
    ancestors = [[0] * (layer + 1)] * width
    return Rows(cache, slot, [0] * width, [position + 1 + layer] * width, [prefix] * width, ancestors)


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
    trie.ahead = nodes[-1]

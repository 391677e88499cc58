"""The forwards of a head, each for several requests: their drafts are entered in the requests' tries."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from drafters.heads.growth.policies import Policy
from drafters.heads.growth.trie import Trie, TriePlace
from drafters.heads.head import Head
from engine.core.drafter_protocol import DeviceVerdicts, OnItsWay

_WIDEST = 16  # nodes of a layer that a device selects by comparing every pair of candidates, 256 by 256


class Forwards:
    """Runs a head's forwards. count, seconds: of the forwards so far, with their predictions; what was drafted behind a
    round is one.
    """

    def __init__(self, head: Head):
        self.head = head
        self.count, self.seconds = 0, 0.0
        self._behind: Any = None  # what was launched for verdicts that have yet to come

    def begin(self, places: list[TriePlace]) -> list[int]:
        """Return the node at the end of each path, from which a tree is to grow."""
        if not self.head.one_pass or not any(path for _, path in places):
            return self.descend(places)
        with self._counted():
            nodes = self._blocks(places)
        others = [row for row, node in enumerate(nodes) if node < 0]
        for row, node in zip(others, self.descend([places[row] for row in others]), strict=True):
            nodes[row] = node
        return nodes

    def draft_ahead(self, places: list[TriePlace], policy: Policy) -> None:
        """Draft what the policy is likely to ask for below node 0 of tries of which nothing is drafted, where a head
        does that without waiting for each layer.
        """
        if not self._drafts_ahead(policy):
            return
        behind, self._behind = self._behind, None
        new = dict.fromkeys(trie for trie, path in places if not path and 0 not in trie.seen)
        if tries := [trie for trie in new if trie.ranking.top_k >= policy.top_k]:
            with self._counted(not self.head.one_pass):
                if behind is not None:
                    tries = behind.enter(tries)
                if tries and not self.head.one_pass:
                    self.head.draft_ahead(tries, policy)
                    self.count += policy.depth

    def draft_behind(self, tries: Sequence[Trie], verdicts: DeviceVerdicts, policy: Policy) -> OnItsWay:
        """Draft what the policy is likely to ask for once the tries have come to what a device will know: `draft_ahead`
        enters it. Each of them `may_draft_behind`.
        """
        self._behind = self.head.draft_behind(tries, verdicts, policy)
        sent: OnItsWay = self._behind.sent
        return sent

    def may_draft_behind(self, trie: Trie, policy: Policy) -> bool:
        """Return whether a trie's next tree may be drafted before its verdict: it has read all of its text, and its
        candidates are ranked by the device alone.
        """
        ranking, session = trie.ranking, trie.session
        ranked = ranking.top_k >= policy.top_k and ranking.ranks_on_device
        read = 0 < session.synced == len(trie.text) - 1 and not session.count_unread()
        return self._drafts_ahead(policy) and ranked and read

    def _drafts_ahead(self, policy: Policy) -> bool:
        """Return whether a device can draft what the policy is likely to ask for."""
        return self.head.drafts_ahead and (self.head.one_pass or (policy.depth > 0 and policy.top_k <= _WIDEST))

    def descend(self, places: list[TriePlace]) -> list[int]:
        """Return the node at the end of each path, drafted where its request does not have it yet."""
        self._draft_roots(dict.fromkeys(trie for trie, _ in places if 0 not in trie.seen))
        nodes = [0] * len(places)
        for level in range(max((len(path) for _, path in places), default=0)):
            going = [row for row, (_, path) in enumerate(places) if len(path) > level]
            reached = self.nodes([(places[row].trie, nodes[row], places[row].path[level]) for row in going])
            for row, node in zip(going, reached, strict=True):
                nodes[row] = node
        return nodes

    def nodes(self, triples: list[tuple[Trie, int, int]]) -> list[int]:
        """Return the nodes of (trie, parent, token); missing ones are drafted in one forward."""
        new: dict[Trie, dict[tuple[int, int], None]] = {}
        for trie, parent, token in triples:
            if (parent, token) in trie.child:
                continue
            if trie.sees_no_further(parent):
                trie.end(parent, token)
            else:
                new.setdefault(trie, {})[parent, token] = None
        if new:
            self._extend({trie: list(pairs) for trie, pairs in new.items()})
        return [trie.child[parent, token] for trie, parent, token in triples]

    def _blocks(self, places: list[TriePlace]) -> list[int]:
        """Return the nodes where a one-pass head's blocks begin, -1 where a path is too long for one."""
        tries = list(dict.fromkeys(trie for trie, _ in places))
        asked = [(trie.session, [path for other, path in places if other is trie]) for trie in tries]
        begun = {trie: iter(nodes) for trie, nodes in zip(tries, self.head.begin(asked), strict=True)}
        nodes = [next(begun[trie]) for trie, _ in places]
        found = [(trie, node, len(path)) for (trie, path), node in zip(places, nodes, strict=True) if node >= 0]
        for trie, node, depth in found:
            trie.depth[node] = depth
        begun_in = dict.fromkeys(trie for trie, _, _ in found)
        self._note([(trie, [node for other, node, _ in found if other is trie], None) for trie in begun_in])
        return nodes

    def _draft_roots(self, tries: Iterable[Trie]) -> None:
        """Draft what may follow node 0 of each trie."""
        if not (new := list(tries)):
            return
        with self._counted():
            roots = self.head.roots([trie.session for trie in new])
            self._note([(trie, [0], logits) for trie, logits in zip(new, roots, strict=True)])

    def _extend(self, new: dict[Trie, list[tuple[int, int]]]) -> None:
        """Draft these nodes, each given by its parent and token: a one-pass head has everything for them already."""
        with self._counted(not self.head.one_pass):
            asked = [(trie.session, [p for p, _ in pairs], [t for _, t in pairs]) for trie, pairs in new.items()]
            extended = self.head.extend(asked)
            for (trie, pairs), (nodes, _) in zip(new.items(), extended, strict=True):
                for pair, node in zip(pairs, nodes, strict=True):
                    trie.child[pair], trie.depth[node] = node, trie.depth[pair[0]] + 1
            self._note([(trie, *found) for trie, found in zip(new, extended, strict=True)])

    def _note(self, found: list[tuple[Trie, list[int], Tensor | None]]) -> None:
        """Store what the head predicts after nodes of tries."""
        if found:
            ranked = self.head.rank([trie.after(nodes, logits) for trie, nodes, logits in found])
            for (trie, nodes, _), seen in zip(found, ranked, strict=True):
                trie.note(nodes, seen)

    @contextmanager
    def _counted(self, is_forward: bool = True) -> Iterator[None]:
        """Time what runs inside, and count it if it is a forward."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started
        self.count += is_forward

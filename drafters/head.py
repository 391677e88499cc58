"""Draft heads as drafters: a head predicts, a growth policy decides what the tree gets, this module joins the two.

A `Head` holds weights and opens one `Session` per request. A session's nodes form a trie below the last synced token,
so the tree of a round, and of any outcome the engine asks about, reuse what has been computed for their common paths.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from drafters.base import BetweenSteps, Drafter, Learned, Verdict, Wanted
from drafters.checkpoint import TargetWeights
from drafters.growth import STATIC_TREES, Adaptive, Candidates, Dynamic, Frontier, Policy, Static, Steps, Talon
from drafters.outcomes import Following
from drafters.ranking import ErrorScale, Ranking
from drafters.requirements import weights_path
from engine.config import Config, DrafterConfig
from engine.loading import find_device
from engine.recorded import wait
from engine.sampling import SamplingParams
from engine.tree import TokenTree

_FORESEEN = 10  # candidates behind each node, for ranking outcomes where the policy wants fewer
_USUAL_ROWS = 24  # a layer of a tree seldom has more nodes
_TREES = 12  # as large as the policy's largest, that a request has room for: those of the likeliest outcomes


class Session(ABC):
    """One request's state in a head. Node 0 is the last synced token; other nodes are drafted below it.

    synced: features have been committed for this many positions of the text; the token at that index is node 0.
    Before the first commit it is 0 and there is no node. depth_limit: nodes this deep predict nothing.
    """

    synced: int = 0
    depth_limit: int | None = None

    @abstractmethod
    def commit(self, start: int, features: Tensor | None, tokens: list[int]) -> None:
        """True features [m, layers, hidden] of the text's positions from `start` on; tokens: the m that follow them.
        None for a head without `feature_layers`.

        Drops all drafted nodes. `start` is `synced` unless features got lost in between; then the head does without.
        """

    def behind(self) -> int:
        """Positions of the text that the next `root` reads first."""
        return 0

    @abstractmethod
    def root(self) -> Tensor | None:
        """Be ready to draft below node 0: its logits, [1, draft_vocab]; None where `rank` needs none."""

    def root_logits(self) -> Tensor:
        """[1, draft_vocab], in any case."""
        logits = self.root()
        assert logits is not None
        return logits

    @abstractmethod
    def extend(self, parents: list[int], tokens: list[int]) -> tuple[list[int], Tensor | None]:
        """New nodes below known ones, in one forward: their ids and logits, [n, draft_vocab] (or [1, ...] for all);
        None where `rank` needs none.
        """

    def begin(self, paths: Sequence[Sequence[int]]) -> list[int]:
        """Nodes at the end of some paths behind node 0, drafted together; -1 for a path that is too long. Only of
        one-pass heads: others `extend` one token at a time.
        """
        raise NotImplementedError

    def rank(self, ranking: Ranking, nodes: list[int], logits: Tensor | None, positions: list[int]) -> Candidates:
        """What may follow these nodes. positions: of the tokens that they predict."""
        assert logits is not None
        return ranking(logits, positions)

    @abstractmethod
    def room(self) -> int:
        """How many more nodes can be drafted."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all nodes but node 0."""

    def close(self) -> None:  # noqa: B027
        """The request is over."""


class Head(ABC):
    """Weights that predict a target's next tokens from its hidden states.

    feature_layers: as `Drafter.feature_layers`. target_ids: [draft_vocab] int64, the target's id of each output.
    method: its name in "talon train". published_growth: the policy its paper used. one_pass: whether whole trees come
    from one forward.
    """

    feature_layers: tuple[int, ...]
    target_ids: Tensor
    device: torch.device
    method: ClassVar[str]
    published_growth: Policy
    one_pass: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def load(cls, path: str, target: TargetWeights, device: str = "cpu") -> Head:
        """Read a checkpoint in the head's public layout."""

    @classmethod
    def from_config(cls, config: Config) -> HeadDrafter:
        """The drafter of this head that `config` describes."""
        path, options = weights_path(config), config.drafter
        target = TargetWeights.read(config.model)
        head = cls.load(path, target, find_device(config.device).type)
        drafter = HeadDrafter(head, policy_of(options, head.published_growth), options.shared_noise)
        drafter.warm_up(target.hidden_size)
        return drafter

    @abstractmethod
    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> Session:
        """A session for a text of at most `capacity` tokens, `prompt` first, with room for `scratch` drafted nodes."""

    # What several sessions are asked at once, which a head may compute in one forward.

    def roots(self, sessions: Sequence[Any]) -> list[Tensor | None]:
        """`Session.root` of each."""
        return [session.root() for session in sessions]

    def extend(self, asked: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[list[int], Tensor | None]]:
        """`Session.extend` of each: (session, parents, tokens). Logits last until the next call."""
        return [session.extend(parents, tokens) for session, parents, tokens in asked]

    def begin(self, asked: Sequence[tuple[Any, list[list[int]]]]) -> list[list[int]]:
        """`Session.begin` of each: (session, paths); of one-pass heads only."""
        return [session.begin(paths) for session, paths in asked]


def policy_of(options: DrafterConfig, published: Policy, default: str = "adaptive") -> Policy:
    """The growth policy that a configuration describes. published: the one of the method's paper; default: where the
    configuration names none.
    """
    growth = options.growth
    name = growth.policy or default
    if name == "static":
        return Static(STATIC_TREES[growth.tree])
    if name == "dynamic":
        return Dynamic(growth.depth, growth.top_k, options.budget)
    if name == "talon":
        return Talon(options.budget, growth.top_k, growth.mu, growth.ungated)
    if name == "adaptive":
        return Adaptive(options.budget, growth.top_k, growth.mu, growth.gate)
    return published


class Advice(Protocol):
    """Another source's part in the growth of one tree."""

    def worth_drafting(self, frontier: Frontier) -> bool:
        """Whether the head is to expand these nodes, or the other source goes on alone."""

    def candidates(self, node: int, parent: int, token: int, seen: Following | None) -> Following:
        """What may follow a node of the growing tree, given what the head sees there (None: it did not look)."""


@dataclass(eq=False)
class _Request:
    text: list[int]
    session: Session
    ranking: Ranking
    child: dict[tuple[int, int], int] = field(default_factory=dict)
    depth: dict[int, int] = field(default_factory=lambda: {0: 0})
    seen: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)

    def forget_nodes(self) -> None:
        self.child, self.depth, self.seen = {}, {0: 0}, {}


class _Place(NamedTuple):
    """A place in a request's trie: a path from node 0."""

    state: _Request
    path: list[int]


class _Growth:
    """A tree that grows from the node `root`. known: its index in the tree -> node of the session."""

    def __init__(self, state: _Request, root: int, steps: Steps, adviser: Advice | None):
        self.state, self.steps, self.adviser = state, steps, adviser
        self.known = {0: root}
        self.frontier = next(steps)


class HeadDrafter(Drafter):
    """Drafts with a head and a growth policy. shared_noise: see `Ranking`."""

    def __init__(self, head: Head, policy: Policy, shared_noise: bool = True):
        self.head, self.policy, self.shared_noise = head, policy, shared_noise
        self.feature_layers = head.feature_layers
        self.together = 24 if head.one_pass else 4
        self.error = ErrorScale()
        self.steps = 0  # forwards of the head so far
        self._requests: dict[int, _Request] = {}

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        scratch = _TREES * (self.policy.max_expansions + 1)
        self._requests[request] = _Request(
            list(prompt),
            self.head.open(prompt, len(prompt) + sampling.max_tokens + 1, scratch),
            Ranking(sampling, self.head.target_ids, max(self.policy.top_k, _FORESEEN), self.shared_noise, self.error),
        )

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        trees: list[TokenTree] = self.propose_many([(request, continuation)])
        return trees[0]

    @torch.inference_mode()
    def propose_many(
        self, wanted: Sequence[Wanted], between_steps: BetweenSteps | None = None, advice: Sequence[Advice] = ()
    ) -> list[TokenTree]:
        """One tree for each, grown in the same forward passes as far as there is room for all.

        advice: for each of them, if another source takes part.
        """
        places = [_Place(self._requests[request], self._path(request, path)) for request, path in wanted]
        trees: dict[int, TokenTree] = {}
        while waiting := [row for row in range(len(wanted)) if row not in trees]:
            group = self._fitting([(row, places[row]) for row in waiting])
            served = {places[row].state for row in group}
            for state, row in {places[row].state: row for row in reversed(waiting)}.items():
                if state not in served:  # nothing to draft from, or no room for even one
                    trees[row] = TokenTree.root_only([*state.text, *places[row].path][-1])
            growths = {
                row: _Growth(state, root, self.policy.steps((path or state.text)[-1]), adviser)
                for row, (state, path), root in zip(
                    group, (places[row] for row in group), self._begin([places[row] for row in group]), strict=True
                )
                for adviser in [advice[row] if advice else None]
            }
            self._grow(growths, trees, between_steps)
        return [trees[row] for row in range(len(wanted))]

    @torch.inference_mode()
    def warm_up(self, hidden_size: int) -> None:
        """Draft for a text of no meaning. On a CPU a product's kernel is made when a number of rows first occurs, 2 ms
        for each; that is not to happen in a request. hidden_size: the target's.
        """
        self.start(0, [0, 0], SamplingParams(max_tokens=1))
        features = np.zeros((2, len(self.feature_layers), hidden_size), np.uint16)
        self.observe(0, Verdict(TokenTree.root_only(0), [0], [0], features if self.feature_layers else None))
        session = self._requests[0].session
        session.root()
        if session.depth_limit is None:
            for rows in range(1, min(self.policy.max_expansions, _USUAL_ROWS) + 1):
                session.clear()
                session.extend([0] * rows, [0] * rows)
        self.finish(0)

    @torch.inference_mode()
    def following(self, wanted: Sequence[Wanted]) -> list[Following]:
        places = [_Place(self._requests[request], self._path(request, path)) for request, path in wanted]
        room = {state: state.session.room() if state.session.synced else -1 for state, _ in places}
        for state, path in places:
            room[state] -= len(path)
        known = [place for place in places if room[place.state] >= 0]
        seen = iter([state.seen[node] for (state, _), node in zip(known, self._descend(known), strict=True)])
        return [next(seen) if room[state] >= 0 else ([], []) for state, _ in places]

    @torch.inference_mode()
    def observe(self, request: int, verdict: Verdict) -> None:
        state = self._requests[request]
        if state.ranking.learns and 0 in state.seen and state.session.synced == len(state.text) - 1:
            state.ranking.learn(state.session.root_logits(), len(state.text), verdict.tokens[0])
        state.text += verdict.tokens
        if not self.feature_layers:
            state.session.commit(state.session.synced, None, state.text[state.session.synced + 1 :])
            state.forget_nodes()
        if verdict.features is None or not len(verdict.features):
            return
        start = len(state.text) - 1 - len(verdict.features)
        known = max(0, state.session.synced - start)
        if known >= len(verdict.features):
            return
        bits = torch.tensor(verdict.features[known:], device=self.head.device)  # copied: messages' arrays are read-only
        features = bits.view(torch.bfloat16)
        state.session.commit(start + known, features, state.text[start + known + 1 :])
        state.forget_nodes()

    def finish(self, request: int) -> None:
        if (ended := self._requests.pop(request, None)) is not None:
            ended.session.close()

    def behind(self, request: int) -> int:
        """Positions of the text that the head has not read, and will when it drafts next."""
        return self._requests[request].session.behind()

    def learned(self) -> Learned:
        return {f"{self.head.method}.error": np.array([self.error.value])}

    def recall(self, learned: Learned) -> None:
        if (error := learned.get(f"{self.head.method}.error")) is not None:
            if not 0 < error.item() < 100:
                raise ValueError("an error that no head has")
            self.error.value = float(error.item())

    def last_token(self, request: int) -> int:
        return self._requests[request].text[-1]

    def seen(self, request: int, continuation: Sequence[int]) -> list[Following]:
        """What the head saw at the text's end and behind each token of `continuation`, as far as it has drafted."""
        state, unsynced = self._requests[request], self._unsynced(self._requests[request])
        nodes = [0]
        for token in [*unsynced, *continuation]:
            if (following := state.child.get((nodes[-1], token))) is None:
                break
            nodes.append(following)
        return [state.seen[node] for node in nodes[len(unsynced) :] if node in state.seen]

    def _unsynced(self, state: _Request) -> list[int]:
        """Tokens behind node 0 whose features have not come (yet): drafted like a continuation, with stand-ins."""
        return state.text[state.session.synced + 1 :] if state.session.synced else []

    def _path(self, request: int, continuation: Sequence[int]) -> list[int]:
        """From node 0 to the end of the continuation."""
        return [*self._unsynced(self._requests[request]), *continuation]

    def _fitting(self, waiting: list[tuple[int, _Place]]) -> list[int]:
        """Of each request the first whose trees are sure to fit into its session's room, which is cleared if it is
        short. None of a request that has nothing to draft from, or no room for even one.
        """
        room: dict[_Request, int] = {}
        fitting = []
        for row, (state, path) in waiting:
            need, session = len(path) + self.policy.max_expansions, state.session
            if state not in room:
                if session.synced and session.room() < need:
                    session.clear()
                    state.forget_nodes()
                room[state] = session.room() if session.synced else -1
            room[state] = room[state] - need if room[state] >= need else -1  # nor what comes behind it
            if room[state] >= 0:
                fitting.append(row)
        return fitting

    def _begin(self, places: list[_Place]) -> list[int]:
        """The node at the end of each path, from which a tree is to grow."""
        if not self.head.one_pass or not any(path for _, path in places):
            return self._descend(places)
        started = time.perf_counter()
        states = list(dict.fromkeys(state for state, _ in places))
        asked = [(state.session, [path for other, path in places if other is state]) for state in states]
        begun = {state: iter(nodes) for state, nodes in zip(states, self.head.begin(asked), strict=True)}
        nodes = [next(begun[state]) for state, _ in places]
        self.steps += 1
        found = [(state, node, len(path)) for (state, path), node in zip(places, nodes, strict=True) if node >= 0]
        for state, node, depth in found:
            state.depth[node] = depth
        for state in dict.fromkeys(state for state, _, _ in found):
            self._note(state, [node for other, node, _ in found if other is state], None)
        self.forward_s += time.perf_counter() - started
        others = [row for row, node in enumerate(nodes) if node < 0]
        for row, node in zip(others, self._descend([places[row] for row in others]), strict=True):
            nodes[row] = node
        return nodes

    def _descend(self, places: list[_Place]) -> list[int]:
        """The node at the end of each path, drafted where its request has not been there before."""
        if new := list(dict.fromkeys(state for state, _ in places if 0 not in state.seen)):
            started = time.perf_counter()
            roots = self.head.roots([state.session for state in new])
            self.forward_s += time.perf_counter() - started
            self.steps += 1
            for state, logits in zip(new, roots, strict=True):
                self._note(state, [0], logits)
        nodes = [0] * len(places)
        for level in range(max((len(path) for _, path in places), default=0)):
            going = [row for row, (_, path) in enumerate(places) if len(path) > level]
            reached = self._nodes([(places[row].state, nodes[row], places[row].path[level]) for row in going])
            for row, node in zip(going, reached, strict=True):
                nodes[row] = node
        return nodes

    def _grow(
        self, growths: dict[int, _Growth], trees: dict[int, TokenTree], between_steps: BetweenSteps | None
    ) -> None:
        """Run growths in lockstep: each turn expands all their frontiers in one forward. trees: filled, by row."""
        while growths:
            if between_steps is not None:
                between_steps(lambda: trees | {row: self._so_far(growth) for row, growth in growths.items()})
            self._expand(list(growths.values()))
            for row, growth in list(growths.items()):
                try:
                    growth.frontier = growth.steps.send(self._candidates(growth))
                except StopIteration as end:
                    trees[row] = end.value
                    del growths[row]

    def _so_far(self, growth: _Growth) -> TokenTree:
        return growth.frontier.sketch.tree().prune(self.policy.budget)

    def _expand(self, growths: list[_Growth]) -> None:
        """Draft the frontiers' nodes that are not drafted yet and worth it, and enter them in `known`."""
        triples, owners = [], []
        for growth in growths:
            frontier, known = growth.frontier, growth.known
            if growth.adviser is not None and frontier.parents[0] >= 0 and not growth.adviser.worth_drafting(frontier):
                continue
            for node, parent, token in zip(frontier.nodes, frontier.parents, frontier.tokens, strict=True):
                if node not in known and parent in known:
                    triples.append((growth.state, known[parent], token))
                    owners.append((known, node))
        for (known, node), handle in zip(owners, self._nodes(triples), strict=True):
            known[node] = handle

    def _candidates(self, growth: _Growth) -> Candidates:
        """What may follow the frontier's nodes."""
        rows: list[Following] = []
        frontier, known, seen_at = growth.frontier, growth.known, growth.state.seen
        for node, parent, token in zip(frontier.nodes, frontier.parents, frontier.tokens, strict=True):
            seen = seen_at[known[node]] if node in known else None
            if growth.adviser is not None:
                seen = growth.adviser.candidates(node, parent, token, seen)
            rows.append(seen or ([], []))
        width = self.policy.top_k
        return Candidates([tokens[:width] for tokens, _ in rows], [chance[:width] for _, chance in rows])

    def _nodes(self, triples: list[tuple[_Request, int, int]]) -> list[int]:
        """The nodes of (request, parent, token); those not yet drafted are, in one forward."""
        new: dict[_Request, dict[tuple[int, int], None]] = {}
        for state, parent, token in triples:
            if (parent, token) in state.child:
                continue
            limit = state.session.depth_limit
            if limit is not None and state.depth[parent] + 1 >= limit:  # the head sees no further
                node = state.child[parent, token] = -1 - len(state.child)
                state.depth[node], state.seen[node] = state.depth[parent] + 1, ([], [])
            else:
                new.setdefault(state, {})[parent, token] = None
        if new:
            started = time.perf_counter()
            asked = [(state.session, [p for p, _ in pairs], [t for _, t in pairs]) for state, pairs in new.items()]
            extended = self.head.extend(asked)
            wait(self.head.device)
            self.forward_s += time.perf_counter() - started
            self.steps += 1
            for (state, pairs), (nodes, logits) in zip(new.items(), extended, strict=True):
                for pair, node in zip(pairs, nodes, strict=True):
                    state.child[pair], state.depth[node] = node, state.depth[pair[0]] + 1
                self._note(state, nodes, logits)
        return [state.child[parent, token] for state, parent, token in triples]

    def _note(self, state: _Request, nodes: list[int], logits: Tensor | None) -> None:
        """Remember what the head sees behind each node."""
        first = nodes if logits is None else nodes[: len(logits)]
        positions = [state.session.synced + 1 + state.depth[node] for node in first]
        seen = state.session.rank(state.ranking, nodes, logits, positions)
        for row, node in enumerate(nodes):
            row = row if len(seen.tokens) > 1 else 0
            state.seen[node] = (seen.tokens[row], seen.chance[row])

"""Draft heads as drafters: a head predicts, a growth policy decides what the tree gets, this module joins the two.

A `Head` holds weights and opens one `Session` per request. A session's nodes form a trie below the last synced token,
so the tree of a round, and of any outcome the engine asks about, reuse what has been computed for their common paths.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from drafters.base import BetweenSteps, Drafter, Learned, Verdict, Wanted
from drafters.checkpoint import TargetWeights
from drafters.growth import STATIC_TREES, Adaptive, Candidates, Dynamic, Frontier, Policy, Static, Talon
from drafters.outcomes import Following
from drafters.ranking import ErrorScale, Ranking
from drafters.requirements import weights_path
from engine.config import Config, DrafterConfig
from engine.loading import find_device
from engine.recorded import wait
from engine.sampling import SamplingParams
from engine.tree import TokenTree

SOURCE = 8
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
        """Nodes at the end of some paths behind node 0, drafted together; -1 for a path that is too long. Heads that
        draft step by step have no better way than to `extend` one token at a time, and return nothing.
        """
        return []

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
        drafter = HeadDrafter(head, policy_of(options, head.published_growth), SOURCE, options.shared_noise)
        drafter.warm_up(target.hidden_size)
        return drafter

    @abstractmethod
    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> Session:
        """A session for a text of at most `capacity` tokens, `prompt` first, with room for `scratch` drafted nodes."""


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


@dataclass
class _Request:
    text: list[int]
    session: Session
    ranking: Ranking
    child: dict[tuple[int, int], int] = field(default_factory=dict)
    depth: dict[int, int] = field(default_factory=lambda: {0: 0})
    seen: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)

    def forget_nodes(self) -> None:
        self.child, self.depth, self.seen = {}, {0: 0}, {}


class HeadDrafter(Drafter):
    """Drafts with a head and a growth policy. source: the bit that marks its nodes; shared_noise: see `Ranking`."""

    def __init__(self, head: Head, policy: Policy, source: int = SOURCE, shared_noise: bool = True):
        self.head, self.policy, self.source, self.shared_noise = head, policy, source, shared_noise
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
        trees: dict[int, TokenTree] = {}
        for request, rows in by_request(wanted).items():

            def so_far(
                grown: Callable[[], dict[int, TokenTree]], rows: list[int] = rows, done: dict[int, TokenTree] = trees
            ) -> None:
                assert between_steps is not None
                between_steps(lambda: done | {rows[place]: tree for place, tree in grown().items()})

            continuations = [wanted[row][1] for row in rows]
            advisers = [advice[row] for row in rows] if advice else []
            found = self._propose(request, continuations, between_steps and so_far, advisers)
            trees |= dict(zip(rows, found, strict=True))
        return [trees[row] for row in range(len(wanted))]

    def _propose(
        self,
        request: int,
        continuations: Sequence[Sequence[int]],
        between_steps: BetweenSteps | None,
        advice: Sequence[Advice],
    ) -> list[TokenTree]:
        state = self._requests[request]
        unsynced = self._unsynced(state)
        paths = [[*unsynced, *continuation] for continuation in continuations]
        trees: list[TokenTree] = []
        while len(trees) < len(paths):
            group = self._fitting(state, paths[len(trees) :])
            if not state.session.synced or not group:  # nothing to draft from, or no room for even one
                trees.append(TokenTree.root_only([*state.text, *continuations[len(trees)]][-1]))
                continue
            roots = self._begin(state, group)
            tokens = [(path or state.text)[-1] for path in group]
            advisers = advice[len(trees) : len(trees) + len(group)] if advice else [None] * len(group)
            trees += self._grow(state, roots, tokens, advisers, between_steps, len(trees))
        return trees

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
        found: dict[int, Following] = {}
        for request, rows in by_request(wanted).items():
            found |= dict(zip(rows, self._following(request, [wanted[row][1] for row in rows]), strict=True))
        return [found[row] for row in range(len(wanted))]

    def _following(self, request: int, continuations: Sequence[Sequence[int]]) -> list[Following]:
        state = self._requests[request]
        unsynced = self._unsynced(state)
        paths = [[*unsynced, *continuation] for continuation in continuations]
        if not state.session.synced or state.session.room() < sum(map(len, paths)):
            return [([], [])] * len(paths)
        return [state.seen[node] for node in self._descend(state, paths)]

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

    def _fitting(self, state: _Request, paths: list[list[int]]) -> list[list[int]]:
        """The first of `paths` whose trees are sure to fit into the session's room, which is cleared if it is short."""
        needs = [len(path) + self.policy.max_expansions for path in paths]
        if state.session.room() < needs[0]:
            state.session.clear()
            state.forget_nodes()
        room, fitting = state.session.room(), 0
        while fitting < len(paths) and needs[fitting] <= room:
            room -= needs[fitting]
            fitting += 1
        return paths[:fitting]

    def _begin(self, state: _Request, paths: list[list[int]]) -> list[int]:
        """The node at the end of each path, from which a tree is to grow."""
        started = time.perf_counter()
        nodes = state.session.begin(paths) if any(paths) else []
        if not nodes:
            return self._descend(state, paths)
        self.steps += 1
        begun = [row for row, node in enumerate(nodes) if node >= 0]
        for row in begun:
            state.depth[nodes[row]] = len(paths[row])
        self._note(state, [nodes[row] for row in begun], None)
        self.forward_s += time.perf_counter() - started
        others = [row for row, node in enumerate(nodes) if node < 0]
        for row, node in zip(others, self._descend(state, [paths[row] for row in others]), strict=True):
            nodes[row] = node
        return nodes

    def _descend(self, state: _Request, paths: list[list[int]]) -> list[int]:
        """The node at the end of each path, drafted where the request has not been there before."""
        if 0 not in state.seen:
            started = time.perf_counter()
            logits = state.session.root()
            self.forward_s += time.perf_counter() - started
            self.steps += 1
            self._note(state, [0], logits)
        nodes = [0] * len(paths)
        for level in range(max(map(len, paths), default=0)):
            going = [row for row, path in enumerate(paths) if len(path) > level]
            reached = self._nodes(state, [(nodes[row], paths[row][level]) for row in going])
            for row, node in zip(going, reached, strict=True):
                nodes[row] = node
        return nodes

    def _grow(
        self,
        state: _Request,
        roots: list[int],
        tokens: list[int],
        advice: Sequence[Advice | None],
        between_steps: BetweenSteps | None,
        first: int,
    ) -> list[TokenTree]:
        """Run one growth per root in lockstep: each turn expands all their frontiers in one forward.

        first: the number of the first of them among those proposed.
        """
        growths = [self.policy.steps(token, self.source) for token in tokens]
        known = [{0: root} for root in roots]  # per growth: index in its tree -> node of the session
        frontiers: dict[int, Frontier] = {row: next(growth) for row, growth in enumerate(growths)}
        trees: dict[int, TokenTree] = {}
        while frontiers:
            if between_steps is not None:
                between_steps(lambda: {first + row: tree for row, tree in self._so_far(trees, frontiers).items()})
            self._expand(state, frontiers, known, advice)
            for row, frontier in list(frontiers.items()):
                try:
                    frontiers[row] = growths[row].send(self._candidates(state, frontier, known[row], advice[row]))
                except StopIteration as end:
                    trees[row] = end.value
                    del frontiers[row]
        return [trees[row] for row in range(len(roots))]

    def _so_far(self, trees: dict[int, TokenTree], frontiers: dict[int, Frontier]) -> dict[int, TokenTree]:
        """The trees that are finished, and what there is of the others."""
        return trees | {row: f.sketch.tree().prune(self.policy.budget) for row, f in frontiers.items()}

    def _expand(
        self,
        state: _Request,
        frontiers: dict[int, Frontier],
        known: list[dict[int, int]],
        advice: Sequence[Advice | None],
    ) -> None:
        """Draft the frontiers' nodes that are not drafted yet and worth it, and enter them in `known`."""
        pairs, owners = [], []
        for row, frontier in frontiers.items():
            adviser = advice[row]
            if adviser is not None and frontier.parents[0] >= 0 and not adviser.worth_drafting(frontier):
                continue
            for node, parent, token in zip(frontier.nodes, frontier.parents, frontier.tokens, strict=True):
                if node not in known[row] and parent in known[row]:
                    pairs.append((known[row][parent], token))
                    owners.append((row, node))
        for (row, node), handle in zip(owners, self._nodes(state, pairs), strict=True):
            known[row][node] = handle

    def _candidates(
        self, state: _Request, frontier: Frontier, known: dict[int, int], adviser: Advice | None
    ) -> Candidates:
        """What may follow the frontier's nodes."""
        rows: list[Following] = []
        for node, parent, token in zip(frontier.nodes, frontier.parents, frontier.tokens, strict=True):
            seen = state.seen[known[node]] if node in known else None
            if adviser is not None:
                seen = adviser.candidates(node, parent, token, seen)
            rows.append(seen or ([], []))
        width = self.policy.top_k
        return Candidates([tokens[:width] for tokens, _ in rows], [chance[:width] for _, chance in rows])

    def _nodes(self, state: _Request, pairs: list[tuple[int, int]]) -> list[int]:
        """The nodes of (parent, token) pairs; those not yet drafted are, in one forward."""
        limit = state.session.depth_limit
        new = [pair for pair in dict.fromkeys(pairs) if pair not in state.child]
        blind = [pair for pair in new if limit is not None and state.depth[pair[0]] + 1 >= limit]
        for pair in blind:
            node = state.child[pair] = -1 - len(state.child)
            state.depth[node], state.seen[node] = state.depth[pair[0]] + 1, ([], [])
        if new := [pair for pair in new if pair not in state.child]:
            started = time.perf_counter()
            nodes, logits = state.session.extend([parent for parent, _ in new], [token for _, token in new])
            wait(self.head.device)
            self.forward_s += time.perf_counter() - started
            self.steps += 1
            for pair, node in zip(new, nodes, strict=True):
                state.child[pair], state.depth[node] = node, state.depth[pair[0]] + 1
            self._note(state, nodes, logits)
        return [state.child[pair] for pair in pairs]

    def _note(self, state: _Request, nodes: list[int], logits: Tensor | None) -> None:
        """Remember what the head sees behind each node."""
        first = nodes if logits is None else nodes[: len(logits)]
        positions = [state.session.synced + 1 + state.depth[node] for node in first]
        seen = state.session.rank(state.ranking, nodes, logits, positions)
        for row, node in enumerate(nodes):
            row = row if len(seen.tokens) > 1 else 0
            state.seen[node] = (seen.tokens[row], seen.chance[row])


def by_request(wanted: Sequence[Wanted]) -> dict[int, list[int]]:
    """The places in `wanted` of each request."""
    rows: dict[int, list[int]] = {}
    for row, (request, _) in enumerate(wanted):
        rows.setdefault(request, []).append(row)
    return rows

"""Draft heads as drafters: joins a head, which predicts, with a growth policy, which decides what the tree gets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.forwards import Forwards
from drafters.heads.growth.lockstep import Advice, Growth, grow
from drafters.heads.growth.policies import Policy, policy_of
from drafters.heads.growth.ranking import ErrorScale, Ranking
from drafters.heads.growth.trie import Trie, TriePlace
from drafters.heads.head import Head
from drafters.parts import weights_path
from engine.config import Config
from engine.core.drafter_protocol import BetweenSteps, DeviceVerdicts, Drafter, OnItsWay, Verdict
from engine.core.outcomes import DraftQuery, Following
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.device import uploaded
from engine.model.loading import find_device

_FORESEEN = 10  # candidates after each node, for ranking outcomes where the policy wants fewer
_READ = 64  # positions of the text that warming up reads
_USUAL_ROWS = 24  # a layer of a tree rarely has more nodes
_TREES = 12  # trees of the policy's largest size that fit into a request's session: those of the likeliest outcomes


class HeadDrafter(Drafter):
    """Drafts with a head and a growth policy; drafts nothing while it rests. shared_noise: see `Ranking`."""

    rests = True
    step_s = 0.001
    """Seconds from one of the head's forwards to the next, as measured when it was loaded."""

    def __init__(self, head: Head, policy: Policy, shared_noise: bool = True):
        self.head, self.policy, self.shared_noise = head, policy, shared_noise
        self.feature_layers = head.feature_layers
        self.together = 8 if head.one_pass else 4
        self.error = ErrorScale()
        self._resting: set[int] = set()  # requests for which the head rests
        self._forwards = Forwards(head)
        self._requests: dict[int, Trie] = {}

    @classmethod
    def of_kind(cls, kind: type[Head], config: Config) -> HeadDrafter:
        """Return the drafter that `config` describes, with a head of this kind."""
        path, options = weights_path(config), config.drafter
        target = TargetWeights.read(config.model)
        head = kind.load(path, target, find_device(config.device).type)
        drafter = cls(head, policy_of(options, head.published_growth), options.shared_noise)
        drafter.warm_up(target.hidden_size)
        return drafter

    @property
    def one_pass(self) -> bool:
        """Whether one forward predicts the whole tree."""
        return self.head.one_pass

    @property
    def steps(self) -> int:
        """Forwards of the head so far."""
        return self._forwards.count

    @property
    def forward_s(self) -> float:  # type: ignore[override]
        return self._forwards.seconds

    @torch.inference_mode()
    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        scratch = _TREES * (self.policy.max_expansions + 1)
        self._requests[request] = Trie(
            list(prompt),
            self.head.open(prompt, len(prompt) + sampling.max_tokens + 1, scratch),
            Ranking(sampling, self.head.target_ids, max(self.policy.top_k, _FORESEEN), self.shared_noise, self.error),
        )

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        trees: list[TokenTree] = self.propose_many([DraftQuery(request, continuation)])
        return trees[0]

    @torch.inference_mode()
    def propose_many(
        self, queries: Sequence[DraftQuery], between_steps: BetweenSteps | None = None, advice: Sequence[Advice] = ()
    ) -> list[TokenTree]:
        """Return one tree for each outcome, grown in the same forward passes as far as there is space for all.

        advice: one for each outcome, if another source takes part.
        """
        self.error.settle()
        places = [self._requests[request].place(path) for request, path in queries]
        trees = {
            row: TokenTree.root_only([*trie.text, *path][-1])
            for row, (trie, path) in enumerate(places)
            if queries[row][0] in self._resting
        }
        while waiting := [row for row in range(len(queries)) if row not in trees]:
            group = self._fitting([(row, places[row]) for row in waiting])
            served = {places[row].trie for row in group}
            for trie, row in {places[row].trie: row for row in reversed(waiting)}.items():
                if trie not in served:  # there is nothing to draft from, or no space for even one
                    trees[row] = TokenTree.root_only([*trie.text, *places[row].path][-1])
            self._forwards.draft_ahead([places[row] for row in group], self.policy)
            roots = self._forwards.begin([places[row] for row in group])
            growths = {}
            for row, root in zip(group, roots, strict=True):
                trie, path = places[row]
                adviser = advice[row] if advice else None
                growths[row] = Growth(trie, root, (path or trie.text)[-1], self.policy, adviser)
            grow(growths, self._forwards, trees, between_steps)
        return [trees[row] for row in range(len(queries))]

    @torch.inference_mode()
    def draft_behind(self, trees: Mapping[int, int], verdicts: DeviceVerdicts) -> OnItsWay | None:
        ready = {
            trie: verdicts.places[tree]
            for request, tree in trees.items()
            if request not in self._resting
            and tree in verdicts.places
            and self._forwards.may_draft_behind(trie := self._requests[request], self.policy)
        }
        if not ready:
            return None
        if [*ready.values()] != [*range(len(verdicts.lengths))]:
            (rows,) = uploaded([torch.tensor([*ready.values()])], verdicts.lengths.device)
            parts = verdicts.lengths, verdicts.tokens, verdicts.features
            verdicts = DeviceVerdicts({}, *(part.index_select(0, rows) for part in parts))
        return self._forwards.draft_behind([*ready], verdicts, self.policy)

    @torch.inference_mode()
    def warm_up(self, hidden_size: int) -> None:
        """Draft for a dummy text, and measure how long that takes. On a CPU a product's kernel is compiled when a
        number of rows first occurs, 2 ms each; this must not happen during a request. Nor must a GPU's graphs be
        captured then, which are others for features from the host than for those that stay. hidden_size: the target's.
        """
        shape = _READ, len(self.feature_layers), hidden_size
        for turn, stay in enumerate((False, False) if self.head.device.type == "cpu" else (False, True, True)):
            self.start(0, [0] * _READ, SamplingParams(max_tokens=1, temperature=1.0))
            features: NDArray[np.uint16] | Tensor = np.zeros(shape, np.uint16)
            if stay:
                features = torch.zeros(shape, dtype=torch.bfloat16, device=self.head.device)
            self.observe(0, Verdict(TokenTree.root_only(0), [0], [0], features if self.feature_layers else None))
            session = self._requests[0].session
            started = time.perf_counter()
            session.root()
            self.read_s = (time.perf_counter() - started) / _READ
            if session.depth_limit is None and turn == 0:
                for rows in range(1, min(self.policy.max_expansions, _USUAL_ROWS) + 1):
                    session.clear()
                    session.extend([0] * rows, [0] * rows)
                session.clear()
            started, steps = time.perf_counter(), self.steps
            self.propose(0)
            self.draft_s = time.perf_counter() - started
            self.step_s = self.draft_s / max(1, self.steps - steps)
            self.finish(0)

    @torch.inference_mode()
    def following(self, queries: Sequence[DraftQuery]) -> list[Following]:
        self.error.settle()
        places = [self._requests[request].place(path) for request, path in queries]
        resting = {self._requests[request] for request in self._resting}
        room = {trie: trie.session.room() if trie not in resting and trie.session.synced else -1 for trie, _ in places}
        for trie, path in places:
            room[trie] -= len(path)
        known = [place for place in places if room[place.trie] >= 0]
        seen = iter([trie.seen[node] for (trie, _), node in zip(known, self._forwards.descend(known), strict=True)])
        return [next(seen) if room[trie] >= 0 else ([], []) for trie, _ in places]

    @torch.inference_mode()
    def observe(self, request: int, verdict: Verdict) -> None:
        self.policy.row_tokens = verdict.row_tokens
        (self._resting.add if verdict.rest else self._resting.discard)(request)
        trie = self._requests[request]
        session = trie.session
        if trie.ranking.learns and 0 in trie.seen and session.synced == len(trie.text) - 1:
            trie.ranking.learn(session.root_logits(), len(trie.text), verdict.tokens[0])
        trie.text += verdict.tokens
        if not self.feature_layers:
            trie.commit(session.synced, None)
        if verdict.features is None or not len(verdict.features):
            return
        start = len(trie.text) - 1 - len(verdict.features)
        known = max(0, session.synced - start)
        if known >= len(verdict.features):
            return
        trie.commit(start + known, _as_tensor(verdict.features[known:]))

    @torch.inference_mode()
    def finish(self, request: int) -> None:
        self._resting.discard(request)
        if (ended := self._requests.pop(request, None)) is not None:
            ended.session.close()

    def count_unread(self, request: int) -> int:
        """Return the positions of the text that the head has yet to read before it drafts next."""
        return self._requests[request].session.count_unread()

    def last_token(self, request: int) -> int:
        return self._requests[request].text[-1]

    def seen(self, request: int, continuation: Sequence[int]) -> list[Following]:
        """Return what the head predicted after the text and after each token of `continuation`, as far as it has
        drafted.
        """
        return self._requests[request].seen_along(continuation)

    def _fitting(self, waiting: list[tuple[int, TriePlace]]) -> list[int]:
        """Return, for each request, the first rows whose trees are sure to fit into its session, which is cleared if
        space is short. None for a request that has nothing to draft from, or no space for even one.
        """
        room: dict[Trie, int] = {}
        fitting = []
        for row, (trie, path) in waiting:
            need, session = len(path) + self.policy.max_expansions, trie.session
            if trie not in room:
                if session.synced and session.room() < need:
                    session.clear()
                    trie.forget_nodes()
                room[trie] = session.room() if session.synced else -1
            room[trie] = room[trie] - need if room[trie] >= need else -1  # later rows of the request do not fit either
            if room[trie] >= 0:
                fitting.append(row)
        return fitting


def _as_tensor(features: NDArray[np.uint16] | Tensor) -> Tensor:
    """Return bfloat16 numbers where they are; from the host copied, because messages' arrays are read-only."""
    return features if isinstance(features, Tensor) else torch.tensor(features).view(torch.bfloat16)

"""Measures the time of rounds, from which the verifier's cost model learns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.config import Config
from engine.core.batch import BLOCK_SIZE, Segment
from engine.core.drafter_protocol import OnItsWay
from engine.core.methods import GRAMMAR, MODELS
from engine.core.tree import TokenTree
from engine.costs.cost_model import CostModel
from engine.costs.forward_time import Attended, ForwardTime
from engine.device import wait
from engine.model.target import Target
from engine.placement import Threads
from engine.verifier.drafter_link import DrafterLink
from engine.verifier.forward_output import Output
from engine.verifier.request import Request
from engine.verifier.step import Step, StepResult
from engine.wire.messages import Array
from engine.wire.trace import Trace

BESIDE = 8  # minimum positions before the rows of a forward measured at start-up
_MEASURED_ROWS = 256  # maximum rows of the forwards measured at start-up
_CHILDREN = 4  # of a node: rows of a tree read their own ancestors, which takes a GPU longer than a chain


class RoundTimer:
    """Measures forwards and rounds for the cost model. busy_ns: time of all forwards so far. forward_ns:
    of the latest.
    """

    def __init__(self, config: Config, target: Target, threads: Threads, trace: Trace):
        self.config, self.target, self.threads, self.trace = config, target, threads, trace
        self.costs = CostModel(ForwardTime({1: 0.001}), config.mode)
        self.busy_ns = self.forward_ns = 0
        self._ended_ns = self._forward_ended_ns = 0  # when the latest round ended, and its forward
        self._behind_s = 0.0  # what the drafts took that were launched behind it
        self._rows = self._requests = 1  # of the latest forward, and those of which trees were verified in it

    # At start-up.

    def measure(self) -> None:
        """Measure the time of forwards."""
        most = self._most_rows()
        forward = MeasuredForward(self.target, most)
        simulated_s = self.config.verifier.simulated_latency_ms / 1000
        times = ForwardTime.measure(
            lambda rows, past: forward.seconds(rows, past) + simulated_s,
            most,
            forward.longest,
            self.target.forward_sizes,
        )
        self.costs = CostModel(times, self.config.mode)
        forward.close()

    def _most_rows(self) -> int:
        """Return the maximum rows of the forwards to measure."""
        drafted = 1 if self.config.method == "none" else self.config.drafter.budget
        room = _MEASURED_ROWS if self.target.pool is None else self.target.pool.blocks * BLOCK_SIZE - BESIDE
        if len(sizes := self.target.forward_sizes) > 1:  # what a prompt's large forward takes follows from no small one
            return max(2, min(sizes[-1], room))
        return max(2, min(_MEASURED_ROWS, room, drafted * self.config.verifier.max_running))

    # In every round.

    def observe_wait(self, decoding: Sequence[Request]) -> None:
        """Start of a round: learn how long it waited for its drafts, unless a prompt was read meanwhile."""
        waited = [request for request in decoding if request.wants_draft and not (request.hit or request.root_only)]
        since_ns = min((request.waiting_since_ns for request in waited), default=0)
        wait_s = (time.perf_counter_ns() - since_ns) / 1e9 if waited and since_ns >= self._ended_ns else 0.0
        if wait_s:
            self.costs.observe_wait(wait_s)
        for request in decoding:
            request.note_wait((wait_s + self._behind_s) / len(waited) if request in waited else 0.0)

    def end_forward(
        self, started_ns: int, segments: Sequence[Segment], output: Output, queued: bool, behind: OnItsWay | None = None
    ) -> None:
        """Wait for what a forward gave, including the simulated accelerator's time. queued: whether it was launched
        behind the one before it, at whose end it began. behind: drafts that were launched behind it, which are waited
        for too, and whose time is none of the forward's.
        """
        self._behind_s = output.wait(behind)
        started_ns = (self._forward_ended_ns if queued else started_ns) + round(self._behind_s * 1e9)
        if self.config.verifier.simulated_latency_ms:
            time.sleep(self.config.verifier.simulated_latency_ms / 1000)
        name = "verify" if segments[0].tree is not None else "prefill"
        self.trace.span(name, started_ns, 0, f"{sum(map(len, segments))} tokens of {len(segments)} requests")
        self._forward_ended_ns = time.perf_counter_ns()
        self.forward_ns = self._forward_ended_ns - started_ns
        self.busy_ns += self.forward_ns
        self._rows, self._requests = sum(map(len, segments)), sum(segment.tree is not None for segment in segments)

    def observe_draft(self, step: Step, result: StepResult, drafter_link: DrafterLink) -> None:
        """Let the request's choice of drafts learn what its draft has gained and taken."""
        if drafter_link.peer is None or not step.wanted:
            return
        tree, of_model = step.drafted, step.draft_us > 0
        verified = step.kept[step.kept < len(tree)]
        alone = np.flatnonzero(tree.source & MODELS == 0)  # what is retrieval's, of a model's tree verified or not
        if not of_model:
            alone = np.intersect1d(alone, verified)
        accepted = sum(bool(source) and source != GRAMMAR for source in result.sources)
        by_retrieval, decided = _followed(tree, alone, result.tokens)
        others = self._rows - len(verified)
        root_s, alone_s, all_s = map(self.costs.forward.seconds, (others + 1, others + decided, self._rows))
        step.request.choice.observe(
            drafter_link.kinds,
            self.costs,
            self._requests,
            by_retrieval=by_retrieval,
            by_model=accepted - by_retrieval,
            retrieval_rows_s=alone_s - root_s,
            model_rows_s=all_s - alone_s,
            waited_s=step.request.waited_s,
            model_drafted=of_model,
        )

    def observe_round(
        self,
        results: Sequence[StepResult],
        steps: Sequence[Step],
        segments: Sequence[Segment],
        drafter_link: DrafterLink,
    ) -> None:
        """Learn from a round at its end. Rounds that lost a request or read a prompt teach nothing but the forward's
        time.
        """
        now, forward_s = time.perf_counter_ns(), self.forward_ns / 1e9
        rows, past = sum(map(len, segments)), sum(segment.past for segment in segments)
        self.costs.forward.observe(rows, Attended(past, sum(len(s) * s.past for s in segments)), forward_s)
        since, self._ended_ns = self._ended_ns, now
        verified = {step.request for step in steps}
        decoded = [result for result in results if result.request in verified]
        if not decoded or len(decoded) < len(steps):
            return
        tokens, round_s = sum(len(result.tokens) for result in decoded), (now - since) / 1e9
        drafter = drafter_link.peer is not None
        if len(segments) > len(steps):
            return
        if all(result.request.round > 1 for result in decoded):
            self.costs.observe_round(len(steps), rows, tokens, round_s - forward_s, past)
            if drafter and all(result.request.wants_draft for result in decoded):
                self._observe_mode(len(steps), tokens, round_s)

    def _observe_mode(self, requests: int, tokens: int, round_s: float) -> None:
        """Let the choice of the mode learn from a round whose requests are all drafted for."""
        ahead = self.costs.drafting_ahead
        self.costs.observe_mode(requests, tokens, round_s)
        if self.costs.drafting_ahead != ahead:
            torch.set_num_threads(self.threads.verifier(not ahead))


def _followed(tree: TokenTree, nodes: Array, tokens: Sequence[int]) -> tuple[int, int]:
    """Return how many of the tokens after its root the tree has with these nodes, and of how many nodes these tokens
    tell whether they are right: of all but those below the last token. nodes: the root among them.
    """
    among, node, matched = set(nodes.tolist()), 0, 0
    for token in tokens:
        below = tree.child(node, token)
        if below is None or below not in among:
            return matched, len(nodes)
        node, matched = below, matched + 1
    return matched, len(nodes) - int(np.count_nonzero(tree.ancestor_mask[nodes, node])) + 1


class MeasuredForward:
    """seconds(rows, past) of a forward over a tree. most: maximum rows.

    A forward's time depends on the length of the text, not on its tokens, so one token's keys and values are copied.
    """

    def __init__(self, target: Target, most: int):
        self._target, self._most = target, most
        self._past = 0
        self._cache: Any = None

    @property
    def longest(self) -> int:
        """The most past positions that a forward can run after."""
        room = self._target.context // 2
        if self._target.pool is not None:
            room = min(room, self._target.pool.blocks * BLOCK_SIZE - self._most)
        return max(0, room - BESIDE)

    def seconds(self, rows: int, past: int) -> float:
        """Time of a forward over a tree of `rows` nodes after a text of `past` positions."""
        cache = self._cache_after(min(past, self.longest) + BESIDE)
        parents = [-1, *(node // _CHILDREN for node in range(rows - 1))]
        tree = Segment.of_tree(TokenTree.from_lists([0] * rows, parents, [1.0] * rows), cache)
        started = time.perf_counter()
        self._target.run([tree])
        wait(self._target.device)
        return time.perf_counter() - started

    def close(self) -> None:
        """Release the text's cache."""
        if self._cache is not None:
            self._target.release(self._cache)
        self._past, self._cache = 0, None

    def _cache_after(self, past: int) -> Any:
        if past != self._past:
            self.close()
            self._past, self._cache = past, self._target.new_cache(self._most + past)
            self._target.run([Segment.of_tree(TokenTree.root_only(0), self._cache)])
            self._cache.commit([0] * past)
        return self._cache

"""Measures the time of rounds, from which the verifier's cost model learns."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from engine.config import Config
from engine.core.batch import BLOCK, Segment
from engine.model.cuda.graphs import wait
from engine.model.target import Target
from engine.verifier.cost_model import Attended, CostModel
from engine.verifier.drafter_link import DrafterLink
from engine.verifier.measured_forward import BESIDE, MeasuredForward
from engine.verifier.placement import Threads
from engine.verifier.request import Request
from engine.verifier.step_input import StepInput
from engine.verifier.step_result import StepResult
from engine.wire.trace import Trace

_MEASURED_ROWS = 256  # maximum rows of the forwards measured at start-up


class RoundTimer:
    """busy_ns: time of all forwards so far. forward_ns: of the latest."""

    def __init__(self, config: Config, target: Target, threads: Threads, trace: Trace):
        self.config, self.target, self.threads, self.trace = config, target, threads, trace
        self.costs = CostModel({1: 0.001}, mode=config.mode)
        self.busy_ns = self.forward_ns = 0
        self._ended_ns = 0  # when the latest round ended

    # At start-up.

    def measure(self) -> None:
        """Measure the time of forwards."""
        most = self._most_rows()
        forward = MeasuredForward(self.target, most)
        simulated_s = self.config.verifier.simulated_latency_ms / 1000
        self.costs = CostModel.measure(
            lambda rows, past: forward.seconds(rows, past) + simulated_s,
            most,
            self.config.mode,
            forward.longest,
            self.target.forward_sizes,
        )
        forward.close()

    def _most_rows(self) -> int:
        """Maximum rows of the forwards to measure."""
        drafted = 1 if self.config.method == "none" else self.config.drafter.budget
        room = _MEASURED_ROWS if self.target.pool is None else self.target.pool.blocks * BLOCK - BESIDE
        if len(sizes := self.target.forward_sizes) > 1:  # what a prompt's large forward takes follows from no small one
            return max(2, min(sizes[-1], room))
        return max(2, min(_MEASURED_ROWS, room, drafted * self.config.verifier.max_running))

    # In every round.

    def observe_wait(self, decoding: Sequence[Request]) -> None:
        """Start of a round: learn how long it waited for its drafts, unless a prompt was read meanwhile."""
        asked_ns = [r.asked_ns for r in decoding if r.wants_draft and not (r.hit or r.root_only)]
        if asked_ns and min(asked_ns) >= self._ended_ns:
            self.costs.observe_wait((time.perf_counter_ns() - min(asked_ns)) / 1e9)

    def end_forward(self, started_ns: int, segments: Sequence[Segment]) -> None:
        """Wait for the end of the forward, including the simulated accelerator's time."""
        wait(self.target.device)
        if self.config.verifier.simulated_latency_ms:
            time.sleep(self.config.verifier.simulated_latency_ms / 1000)
        name = "verify" if segments[0].tree is not None else "prefill"
        self.trace.span(name, started_ns, 0, f"{sum(map(len, segments))} tokens of {len(segments)} requests")
        self.forward_ns = time.perf_counter_ns() - started_ns
        self.busy_ns += self.forward_ns

    def observe_round(
        self,
        concluded: Sequence[StepResult],
        rounds: Sequence[StepInput],
        segments: Sequence[Segment],
        drafts: DrafterLink,
    ) -> None:
        """End of a round. Rounds that lost a request teach nothing but the forward's time, and those that read a prompt
        only that and what drafts gain.
        """
        now, forward_s = time.perf_counter_ns(), self.forward_ns / 1e9
        rows, past = sum(map(len, segments)), sum(segment.past for segment in segments)
        self.costs.observe_forward(rows, Attended(past, sum(len(s) * s.past for s in segments)), forward_s)
        since, self._ended_ns = self._ended_ns, now
        verified = {round_.request for round_ in rounds}
        decoded = [conclusion for conclusion in concluded if conclusion.request in verified]
        if not decoded or len(decoded) < len(rounds):
            return
        tokens, round_s = sum(len(c.tokens) for c in decoded), (now - since) / 1e9
        drafter = drafts.drafter is not None
        if drafter and (asked := sum(round_.asked for round_ in rounds)):
            self.costs.observe_drafts(asked, len(rounds), sum(map(len, segments[: len(rounds)])), tokens)
        if len(segments) > len(rounds):
            return
        if all(conclusion.request.round > 1 for conclusion in decoded):
            self.costs.observe_round(len(rounds), rows, tokens, round_s - forward_s, past)
            if drafter and all(conclusion.request.wants_draft for conclusion in decoded):
                self._observe_ways(len(rounds), tokens, round_s, drafts.wants.rests)

    def _observe_ways(self, requests: int, tokens: int, round_s: float, rests: bool) -> None:
        """Let the choices learn from a round whose requests are all drafted for. rests: the drafter has a model that
        can rest.
        """
        ahead = self.costs.ahead.second
        self.costs.observe_ways(requests, tokens, round_s, rests)
        if self.costs.ahead.second != ahead:
            torch.set_num_threads(self.threads.verifier(not ahead))

"""What rounds take: the verifier's clock, from which its cost model and its pace learn."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from engine.batch import BLOCK, Segment
from engine.conclusion import Conclusion
from engine.config import Config
from engine.cost_model import CostModel
from engine.pace import Pace
from engine.recorded import wait
from engine.request import Request
from engine.round import Round
from engine.target import Target
from engine.trace import Trace
from engine.tree import TokenTree

_BESIDE = 8  # positions before the rows of a forward that is measured
_MEASURED_ROWS = 256  # of a forward, at most, whose time is measured at start-up


class Meter:
    """busy_ns: of all forwards so far. forward_ns: of the latest."""

    def __init__(self, config: Config, target: Target, pace: Pace, trace: Trace):
        self.config, self.target, self.pace, self.trace = config, target, pace, trace
        self.costs = CostModel({1: 1.0})
        self.busy_ns = self.forward_ns = 0
        self._ended_ns = 0  # when the latest round ended

    # At start-up.

    def measure(self) -> None:
        """Find out what forwards take."""
        self.costs = CostModel.measure(self._forward_s, self._most_rows())

    def _most_rows(self) -> int:
        """Of the forwards to measure."""
        drafted = 1 if self.config.method == "none" else self.config.drafter.budget
        room = _MEASURED_ROWS if self.target.pool is None else self.target.pool.blocks * BLOCK - _BESIDE
        return max(2, min(_MEASURED_ROWS, room, drafted * self.config.verifier.max_running))

    def _forward_s(self, rows: int, past: int) -> float:
        """Seconds of a forward over a tree of so many nodes behind a text of that length."""
        past = min(past + _BESIDE, self.target.context // 2)
        if self.target.pool is not None:
            past = max(1, min(past, self.target.pool.blocks * BLOCK - rows))
        cache = self.target.new_cache(rows + past)
        self.target.prefill(cache, [i % self.target.vocab_size for i in range(past)])
        started = time.perf_counter()
        self.target.run([Segment.of_tree(TokenTree.chain(0, [0] * (rows - 1), [1.0] * (rows - 1)), cache)])
        wait(self.target.device)
        self.target.release(cache)
        return time.perf_counter() - started + self.config.verifier.simulated_latency_ms / 1000

    # Of every round.

    def observe_wait(self, decoding: Sequence[Request]) -> None:
        """The round begins: learn how long its drafts were waited for, unless a prompt was read meanwhile."""
        asked_ns = [r.asked_ns for r in decoding if r.drafted and not (r.hit or r.alone)]
        if asked_ns and min(asked_ns) >= self._ended_ns:
            self.costs.observe_wait((time.perf_counter_ns() - min(asked_ns)) / 1e9)

    def end_forward(self, started_ns: int, segments: Sequence[Segment]) -> None:
        """Wait for the forward's end, the simulated accelerator's included."""
        wait(self.target.device)
        if self.config.verifier.simulated_latency_ms:
            time.sleep(self.config.verifier.simulated_latency_ms / 1000)
        name = "verify" if segments[0].tree is not None else "prefill"
        self.trace.span(name, started_ns, 0, f"{sum(map(len, segments))} tokens of {len(segments)} requests")
        self.forward_ns = time.perf_counter_ns() - started_ns
        self.busy_ns += self.forward_ns

    def observe_round(
        self, concluded: Sequence[Conclusion], rounds: Sequence[Round], segments: Sequence[Segment], drafter: bool
    ) -> None:
        """The round ends; if it read a prompt, or lost a request, it says nothing of rates. drafter: there is one."""
        now, forward_s = time.perf_counter_ns(), self.forward_ns / 1e9
        rows = sum(map(len, segments))
        self.costs.observe_forward(rows, sum(len(s) * s.past for s in segments), forward_s)
        since, self._ended_ns = self._ended_ns, now
        decoded = [conclusion for conclusion in concluded if conclusion.request.round]
        if len(segments) > len(rounds) or not decoded or len(decoded) < len(rounds):
            return
        tokens, round_s = sum(len(c.tokens) for c in decoded), (now - since) / 1e9
        if drafter and (asked := sum(r.request.drafted and not r.request.alone for r in rounds)):
            self.costs.observe_drafts(asked, len(rounds), rows, tokens)
        if all(conclusion.request.round > 1 for conclusion in decoded):
            self.costs.observe_round(len(rounds), rows, tokens, round_s - forward_s)
        request = decoded[0].request
        alone = len(rounds) == 1 and drafter and request.drafted and request.round > 1
        if alone and self.pace.observe(tokens, round_s, forward_s):
            torch.set_num_threads(self.pace.threads)

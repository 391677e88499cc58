"""Counts what an engine has done since it started, from its workers' messages: for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.wire.messages import Heartbeat, Tokens


@dataclass
class Totals:
    """Counters that only grow, and the verifier's latest state.

    prompt_tokens: of accepted requests. rounds: of all requests, without prefills; hits: rounds whose tree had arrived
    by the previous verdict. nodes: verified, roots included. drafts: rounds with a draft; draft_tokens, accepted:
    tokens in these drafts; accepted_at: rounds that accepted a token at each place of the draft, in order.
    prefix_queries: tokens of prompts looked up in the prefix cache, prefix_hits: found there. busy_s: of target
    forwards. state: running and waiting requests, blocks of keys and values.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    hits: int = 0
    nodes: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    prefix_queries: int = 0
    prefix_hits: int = 0
    busy_s: float = 0.0
    state: Heartbeat = field(default_factory=Heartbeat)
    _busy_us: int = 0  # as counted by the current verifier

    def add(self, round_: Tokens) -> None:
        """Count a round, or a prefill."""
        self.tokens += len(round_.tokens)
        self.busy_s += max(0, round_.busy_us - self._busy_us) / 1e6
        self._busy_us = round_.busy_us
        if not round_.round:
            return
        self.rounds += 1
        self.hits += round_.hit
        self.nodes += round_.nodes
        if round_.nodes < 2:
            return
        accepted = len(round_.tokens) - 1
        self.drafts += 1
        self.draft_tokens += round_.nodes - 1
        self.accepted += accepted
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1

    def look_up(self, prompt: int, cached: int) -> None:
        """Count a prompt of `prompt` tokens, `cached` of which were found in the prefix cache."""
        self.prefix_queries += prompt
        self.prefix_hits += cached

    def new_verifier(self) -> None:
        """Begin with a new verifier, whose counts begin at zero."""
        self._busy_us, self.state = 0, Heartbeat()

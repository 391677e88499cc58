"""Prometheus metrics: vLLM's names where it has one, so that its dashboards work, and Talon's own beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.answer import Result
from engine.api import Engine
from engine.server.reading.changes import ChangedText

_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Latencies:
    """The latencies of each answer, as seen by the server."""

    def __init__(self, registry: CollectorRegistry, model: str):
        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, about, ["model_name"], buckets=buckets, registry=registry)
            return made.labels(model)

        self._first = histogram("vllm:time_to_first_token_seconds", "Until an answer's first token.", _FIRST_S)
        self._between = histogram("vllm:inter_token_latency_seconds", "For each token after the first.", _TOKEN_S)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Until an answer's last token.", _REQUEST_S)
        self._queued = histogram("vllm:request_queue_time_seconds", "Until a request runs.", _REQUEST_S)
        self._token = histogram(
            "vllm:request_time_per_output_token_seconds", "Of each answer: the mean after its first token.", _TOKEN_S
        )
        self._ended = Counter(
            "vllm:request_success", "Answers that ended.", ["model_name", "finished_reason"], registry=registry
        )
        self._refused = Counter(
            "talon:http_errors", "Requests that failed or were refused.", ["status"], registry=registry
        )
        self._model = model

    def emitted(self, before_s: float, tokens: int, first: bool) -> float:
        """Count `tokens` tokens that arrived, the previous ones at `before_s` (time.perf_counter). Returns when these
        arrived.
        """
        now_s = time.perf_counter()
        if first:
            self._first.observe(now_s - before_s)
        elif tokens:
            for _ in range(tokens):
                self._between.observe((now_s - before_s) / tokens)
        return now_s

    def ended(self, started_s: float, result: Result, reason: str) -> None:
        """Count an answer that is complete."""
        self._whole.observe(time.perf_counter() - started_s)
        first, *later = result.rounds
        self._queued.observe(first.queued_us / 1e6)
        if (tokens := sum(len(round_.tokens) for round_ in later)) > 0:
            self._token.observe(sum(round_.round_us for round_ in later) / 1e6 / tokens)
        self._ended.labels(self._model, reason).inc()

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._refused.labels(str(status)).inc()


class EngineCollector(Collector):
    """Reads the engine's counters on request. changed: text of prompts that spoils the prefix cache."""

    def __init__(self, engine: Engine, model: str, changed: ChangedText):
        self.engine, self.model, self.changed = engine, model, changed

    def collect(self) -> Iterator[Metric]:
        totals = self.engine.totals
        state = totals.state
        running = min(state.running, self.engine.requests)
        yield self._gauge("vllm:num_requests_running", "Requests that share forwards.", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests accepted that wait.", self.engine.requests - running)
        share = state.held_blocks / state.blocks if state.blocks else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of key and value blocks held, 0 to 1.", share)
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts.", totals.prompt_tokens)
        queries, hits = totals.prefix_queries, totals.prefix_hits
        yield self._counter("vllm:prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.", queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens of prompts found in the prefix cache.", hits)
        about = "Tokens of prompts read again, behind a text that had changed."
        yield self._counter("talon:prompt_tokens_behind_changes", about, self.changed.tokens)
        yield self._counter("vllm:generation_tokens", "Tokens of answers.", totals.tokens)
        yield self._counter("vllm:spec_decode_num_drafts", "Rounds that had a draft.", totals.drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted and verified.", totals.draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.", totals.accepted)
        yield self._accepted_per_position(totals.accepted_at)
        yield self._gauge("talon:kv_blocks", "Blocks of 16 positions, held or free.", state.blocks)
        yield self._gauge("talon:kv_blocks_held", "Blocks that requests hold.", state.held_blocks)
        yield self._gauge("talon:kv_bytes", "Of memory, at most, for keys and values.", self.engine.target.kv_bytes)
        yield self._gauge("talon:state_bytes", "Of memory, at most, for states.", self.engine.target.state_bytes)
        yield self._gauge("talon:weight_bytes", "Of memory, for the weights.", self.engine.target.weight_bytes)
        yield self._gauge("talon:verifier_ready", "1 while a verifier serves.", int(self.engine.ready))
        yield self._counter("talon:verifier_busy_seconds", "Spent in the target's forwards.", totals.busy_s)
        yield self._counter("talon:rounds", "Rounds of all requests.", totals.rounds)
        yield self._counter("talon:draft_hits", "Rounds whose tree was there at the verdict before.", totals.hits)
        yield self._counter("talon:verified_nodes", "Nodes verified, roots included.", totals.nodes)

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, about, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(name, about, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _accepted_per_position(self, accepted_at: list[int]) -> Metric:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "Of these, by place in the draft.", labels=["model_name", "position"])
        for position, count in enumerate(accepted_at or [0]):  # the name exists before the first token is accepted
            family.add_metric([self.model, str(position)], count)
        return family

"""What a caller gets: pieces while an answer is generated, then the whole answer and its metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from engine.core.methods import source_name
from engine.core.params import SamplingParams
from engine.text.stream import TextStream
from engine.wire.messages import Ready, TokenLogprob, Tokens


class DraftingGains(msgspec.Struct, frozen=True):
    """What drafting gained, as servers count it. drafts: trees verified; draft_tokens: their nodes below the roots;
    accepted_tokens: drafted nodes that the target drew; accepted_per_position: by depth, starting just below the root.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]


class Metrics(msgspec.Struct, frozen=True):
    """How an answer was produced.

    mean_accepted_tokens: tokens per round, bonus included; the first token is the prefill's and not counted.
    tokens_per_second: of the answer, from the call to the last token. verifier_busy: share of the decoding time that
    the verifier spent in target forwards, for any request. draft_hit_rate: share of rounds whose tree had arrived by
    the previous verdict. cached_tokens: prompt tokens found in the prefix cache. exact: the text is that of plain
    decoding, bit for bit; inexact: why that is not certain. activations: how the target's products took their rows;
    weights: the type that most of its matrices are held in; kv_type: what its keys and values were kept as.
    """

    mean_accepted_tokens: float
    rounds: int
    tokens_per_second: float
    time_to_first_token_s: float
    verifier_busy: float
    draft_hit_rate: float
    cached_tokens: int
    exact: bool
    inexact: str
    activations: str
    kv_type: str
    weights: str
    speculative_decoding: DraftingGains


class Piece(msgspec.Struct, frozen=True):
    """New text of a streamed answer, and the tokens that arrived with it. sources, logprobs: one per token, as in
    `Result`; prompt_logprobs: likewise, only with the first piece.
    """

    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


class Result(msgspec.Struct, frozen=True):
    """A finished answer. finish_reason: "eos", "length" or "stop". stop_text: the stop text that ended it, "" if none
    did. rounds: what each round emitted and cost.

    sources: who proposed each token: "head", "retrieval", "grammar", or "target" if no drafter did. logprobs: one per
    token, None unless requested. prompt_logprobs: one per prompt token; the first is None, since nothing precedes it.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    metrics: Metrics
    rounds: list[Tokens]
    sources: list[str] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    stop_text: str = ""


class Answer:
    """Collects the rounds of one answer. started_s: when it was requested, on the `time.perf_counter` clock. target:
    the verifier's facts. sampling: the request's.
    """

    def __init__(self, text: TextStream, prompt_tokens: int, started_s: float, target: Ready, sampling: SamplingParams):
        self.text, self.prompt_tokens, self.started_s, self.target = text, prompt_tokens, started_s, target
        self.sampling = sampling
        self.token_ids: list[int] = []
        self.rounds: list[Tokens] = []
        self.first_s = self.last_s = 0.0
        self.finish_reason: str | None = None

    def add(self, round_: Tokens) -> Piece:
        """Add a round, and return its piece; tokens after a stop string are dropped. As in vLLM, stop strings that end
        within the first `min_tokens` tokens do not count; each token decides for itself, so the rounds' lengths do not
        matter. A stop string that is the text of the end token changes nothing: the answer has ended by itself.
        """
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self.rounds.append(round_)
        self.finish_reason = round_.finish_reason
        known = len(self.token_ids)
        for token in round_.tokens:
            self.token_ids.append(token)
            if token in self.sampling.stop_token_ids:  # a stop token is the last one, and no part of the text
                break
            if self.text.push(token, may_stop=len(self.token_ids) > self.sampling.min_tokens):
                ended = round_.finish_reason == "eos" and token in self.target.eos_tokens
                self.finish_reason = "eos" if ended else "stop"
                break
        new = len(self.token_ids) - known
        return Piece(
            self.text.take(final=self.finish_reason is not None),
            tuple(self.token_ids[known:]),
            tuple(source_name(bits) for bits in round_.sources[:new]),
            round_.logprobs[:new],
            (None, *round_.prompt_logprobs) if self._wants_prompt(round_) else (),
        )

    def result(self) -> Result:
        assert self.finish_reason is not None
        first, last = self.rounds[0], self.rounds[-1]
        rounds, kept = len(self.rounds) - 1, len(self.token_ids)
        metrics = Metrics(
            mean_accepted_tokens=(kept - 1) / rounds if rounds else 0.0,
            rounds=rounds,
            tokens_per_second=kept / (self.last_s - self.started_s),
            time_to_first_token_s=self.first_s - self.started_s,
            verifier_busy=self._busy_us() / max(1, last.at_us - first.at_us),
            draft_hit_rate=sum(r.hit for r in self.rounds[1:]) / rounds if rounds else 0.0,
            cached_tokens=first.cached,
            exact=self.target.exact,
            inexact=self.target.inexact,
            activations=self.target.activations,
            kv_type=self.target.kv_type,
            weights=self.target.weights,
            speculative_decoding=speculative_decoding(self.rounds[1:]),
        )
        return Result(
            self.text.text,
            self.token_ids,
            self.prompt_tokens,
            self.finish_reason,
            metrics,
            self.rounds,
            [source_name(bits) for round_ in self.rounds for bits in round_.sources][:kept],
            None if self.sampling.logprobs is None else [t for r in self.rounds for t in r.logprobs][:kept],
            None if self.sampling.prompt_logprobs is None else [None, *first.prompt_logprobs],
            self.text.stop_text if self.finish_reason == "stop" else "",
        )

    def _busy_us(self) -> int:
        """Return the time of the verifiers that ran the rounds: each counts from 0."""
        return sum(max(0, later.busy_us - round_.busy_us) for round_, later in pairwise(self.rounds))

    def _wants_prompt(self, round_: Tokens) -> bool:
        return self.sampling.prompt_logprobs is not None and round_ is self.rounds[0]


def speculative_decoding(rounds: Sequence[Tokens]) -> DraftingGains:
    """Count over the rounds after the prefill."""
    accepted = [len(round_.tokens) - 1 for round_ in rounds]
    return DraftingGains(
        drafts=sum(round_.nodes > 1 for round_ in rounds),
        draft_tokens=sum(round_.nodes - 1 for round_ in rounds),
        accepted_tokens=sum(accepted),
        accepted_per_position=[sum(count > depth for count in accepted) for depth in range(max(accepted, default=0))],
    )

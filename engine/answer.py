"""What a caller gets: pieces while an answer is under way, then the whole of it and how it came about."""

from __future__ import annotations

import time

import msgspec

from engine.messages import Tokens
from engine.text import TextStream


class Metrics(msgspec.Struct, frozen=True):
    """How an answer came about.

    mean_accepted_tokens: tokens per round, bonus included; the first token is the prefill's and not counted.
    tokens_per_second: of the answer, from the call to the last token. verifier_busy: share of the decoding time that
    the verifier spent in target forwards, for whichever request. draft_hit_rate: rounds whose tree was there when the
    verdict before fell. exact: the text is that of plain decoding, bit for bit; inexact: why that is not certain.
    """

    mean_accepted_tokens: float
    rounds: int
    tokens_per_second: float
    time_to_first_token_s: float
    verifier_busy: float
    draft_hit_rate: float
    exact: bool
    inexact: str


class Piece(msgspec.Struct, frozen=True):
    """New text of a streamed answer, and the tokens that arrived with it."""

    text: str
    token_ids: tuple[int, ...]


class Result(msgspec.Struct, frozen=True):
    """A finished answer. finish_reason: "eos", "length" or "stop". rounds: what each round emitted and cost."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    metrics: Metrics
    rounds: list[Tokens]


class Answer:
    """Collects the rounds of one answer. started_s: when it was asked for, on the clock of `time.perf_counter`.
    inexact: of the target that gives it.
    """

    def __init__(self, text: TextStream, prompt_tokens: int, started_s: float, inexact: str):
        self.text, self.prompt_tokens, self.started_s, self.inexact = text, prompt_tokens, started_s, inexact
        self.token_ids: list[int] = []
        self.rounds: list[Tokens] = []
        self.first_s = self.last_s = 0.0
        self.finish_reason: str | None = None

    def add(self, round_: Tokens) -> Piece:
        """Take in a round; what comes after a stop string is dropped."""
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self.rounds.append(round_)
        self.finish_reason = round_.finish_reason
        known = len(self.token_ids)
        for token in round_.tokens:
            self.token_ids.append(token)
            if self.text.push(token):
                self.finish_reason = "stop"
                break
        return Piece(self.text.take(final=self.finish_reason is not None), tuple(self.token_ids[known:]))

    def result(self) -> Result:
        assert self.finish_reason is not None
        first, last = self.rounds[0], self.rounds[-1]
        rounds = len(self.rounds) - 1
        metrics = Metrics(
            mean_accepted_tokens=(len(self.token_ids) - 1) / rounds if rounds else 0.0,
            rounds=rounds,
            tokens_per_second=len(self.token_ids) / (self.last_s - self.started_s),
            time_to_first_token_s=self.first_s - self.started_s,
            verifier_busy=(last.busy_us - first.busy_us) / max(1, last.at_us - first.at_us),
            draft_hit_rate=sum(r.hit for r in self.rounds[1:]) / rounds if rounds else 0.0,
            exact=not self.inexact,
            inexact=self.inexact,
        )
        return Result(self.text.text, self.token_ids, self.prompt_tokens, self.finish_reason, metrics, self.rounds)

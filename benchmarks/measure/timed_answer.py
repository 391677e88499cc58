"""One answer of whatever is compared."""

from __future__ import annotations

import msgspec

from engine.wire.messages import Tokens


class TimedAnswer(msgspec.Struct, frozen=True):
    """One answer and its timings. seconds: from the call to the last token. token_ms: for every token but the first,
    its share of the time since the last emission, as several may come at once. exact, inexact,
    activations, weights: as in engine.answer.
    """

    token_ids: list[int]
    seconds: float
    rounds: int | None
    mean_accepted_tokens: float | None
    time_to_first_token_s: float | None
    verifier_busy: float | None
    draft_hit_rate: float | None
    log: list[Tokens]
    token_ms: list[float] = []
    exact: bool = False
    inexact: str = ""
    cached_tokens: int | None = None
    activations: str | None = None
    weights: str | None = None

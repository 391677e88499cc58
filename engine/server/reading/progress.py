"""How far a prompt has been read, and the times of an answer, with llama.cpp's names."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from engine.answer import Result
from engine.server.http.connection import GOES_ON
from engine.wire.messages import PromptProgress


class Timings(BaseModel):
    """The times of an answer. cache_n: prompt tokens found in the prefix cache; prompt_n, prompt_ms: tokens read, and
    the time until the first token; predicted_n, predicted_ms: of the answer, and the time from its first token on.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


def timings(result: Result) -> Timings:
    """Return the timings of a finished answer."""
    metrics = result.metrics
    cached = min(metrics.cached_tokens, result.prompt_tokens)
    prompt_n, predicted_n = result.prompt_tokens - cached, len(result.token_ids)
    prompt_ms = 1000 * metrics.time_to_first_token_s
    predicted_ms = sum(round_.round_us for round_ in result.rounds[1:]) / 1000
    return Timings(
        cache_n=cached,
        prompt_n=prompt_n,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / max(1, prompt_n),
        prompt_per_second=1000 * prompt_n / prompt_ms if prompt_ms else 0.0,
        predicted_n=predicted_n,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=predicted_ms / max(1, predicted_n - 1),
        predicted_per_second=1000 * (predicted_n - 1) / predicted_ms if predicted_ms else 0.0,
        draft_n=metrics.speculative_decoding.draft_tokens,
        draft_n_accepted=metrics.speculative_decoding.accepted_tokens,
    )


def progress_fields(progress: PromptProgress) -> dict[str, Any]:
    """Return the field of a stream's chunk; `left_ms` is ours."""
    return {
        "prompt_progress": {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.read,
            "time_ms": progress.elapsed_us // 1000,
            "left_ms": progress.left_us // 1000,
        }
    }


def comment(progress: PromptProgress | None) -> bytes:
    """Return a silent stream's comment: how far its prompt is, if that is being read."""
    if progress is None:
        return GOES_ON
    seconds = -(-progress.left_us // 10**6)
    return f": {progress.read} of {progress.total} tokens of the prompt are read, about {seconds} s to go\n\n".encode()

"""Log-probabilities of the model's own distribution, bit-identical in every forward that gives the same logits.

They are computed from one row of logits at a time, on the CPU. The order of summation depends only on the length of the
row, not on other rows or threads, so they are as exact as the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.wire.messages import TokenLogprob


def token_logprob(logits: Tensor, token: int, alternatives: int) -> TokenLogprob:
    """Return the log-probability of `token`, and of the likeliest tokens; ties go to the lower id. logits: [vocab],
    before penalties, grammar and temperature.
    """
    row: NDArray[np.float32] = logits.float().cpu().numpy()
    peak = row.max()
    log_sum = float(peak) + math.log(float(np.exp(row - peak).sum(dtype=np.float64)))
    top = _likeliest(row, alternatives)
    return TokenLogprob(
        token, float(row[token]) - log_sum, tuple((int(other), float(row[other]) - log_sum) for other in top)
    )


def token_logprobs(rows: Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """Return `token_logprob` of each token after its row of [rows, vocab]; rows without a token are left out."""
    return [token_logprob(row, token, alternatives) for row, token in zip(rows, tokens, strict=False)]


def _likeliest(row: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    count = min(count, len(row))
    if count == 0:
        return np.zeros(0, np.int64)
    least = np.partition(row, -count)[-count]
    candidates = np.flatnonzero(row >= least)
    ranked: NDArray[np.int64] = candidates[np.argsort(-row[candidates], kind="stable")][:count]
    return ranked

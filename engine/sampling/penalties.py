"""Penalties and bias: a request's changes to the model's logits before grammar, temperature and draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.params import SamplingParams


class Penalties:
    """A request's penalties, in this order: repetition penalty, frequency and presence penalty, logit bias.

    The first covers prompt and answer and scales logits, as `transformers` does. The next two cover the answer and are
    subtracted, as OpenAI's API says. The bias comes last, so that none of them scales it.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int], vocab_size: int):
        self._repetition = params.repetition_penalty or 1.0
        self._frequency, self._presence = params.frequency_penalty, params.presence_penalty
        self._seen: Tensor | None = None  # [vocab] bool, in prompt or answer
        if self._repetition != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor([*prompt, *answer])] = True
        self._counts: Tensor | None = None  # [vocab] float32, in the answer
        if self._frequency or self._presence:
            drawn = torch.tensor(list(answer), dtype=torch.int64)
            self._counts = torch.bincount(drawn, minlength=vocab_size).float()
        self._bias: Tensor | None = None  # [vocab] float32
        if params.logit_bias:
            self._bias = torch.zeros(vocab_size, dtype=torch.float32)
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
            self._bias[torch.tensor(list(params.logit_bias))] = values

    def __bool__(self) -> bool:
        return self._seen is not None or self._counts is not None or self._bias is not None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return `logits` [vocab] float32 with all of them applied."""
        if self._seen is not None:
            seen = self._seen = self._seen.to(logits.device)
            logits = penalised(logits, seen, self._repetition)
        if self._counts is not None:
            counts = self._counts = self._counts.to(logits.device)
            logits = logits - self._frequency * counts - self._presence * (counts > 0).float()
        if self._bias is not None:
            self._bias = self._bias.to(logits.device)
            logits = logits + self._bias
        return logits

    def saw(self, token: int) -> None:
        """Count a drawn `token`."""
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return `logits` [vocab] with the repetition penalty on the tokens that were `seen`, [vocab] bool."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

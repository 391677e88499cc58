"""Where two texts of a target that is not exact first differ: was it rounding, or a mistake?

Such a target sums in another order in one forward over eight tokens than in eight forwards over one. Where the scores
of two tokens differ by less than this rounding, either may win, and the texts differ from there on. Both tokens' scores
are therefore taken from a float32 forward over the text before: a gap below `TIE` is a tie, anything else an error.

Comparing with float32 texts is another matter: a type with fewer bits rounds every weighted sum, and how far that moves
logits depends on the model. `most_turned` measures it on the same texts, with transformers' own forward.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from engine.config import Config
from engine.core.params import SamplingParams, own_defaults
from engine.sampling.noise import gumbel
from engine.sampling.penalties import penalised

if TYPE_CHECKING:
    from engine.model.target import Target

TIE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""The float32 gap of logits that rounding may reverse, by the type in which a target computes."""


class Referee:
    """Judges the texts of one target. The model is loaded only when there is something to judge."""

    def __init__(self, config: Config):
        self.config = config

    @cached_property
    def judge(self) -> Target:
        from engine.model.target import Target

        return Target.load(self.config.model, "float32", self.config.device)

    @cached_property
    def dtype(self) -> str:
        """The type in which the target computes while it is compared."""
        from engine.model.loading import dtype_of, name_of

        return name_of(dtype_of(self.config))

    def is_tie(self, prompt: list[int], one: list[int], other: list[int], sampling: SamplingParams) -> bool:
        """Return whether rounding alone can have made the two answers different."""
        return score_gap(self.judge, prompt, one, other, sampling) < TIE[self.dtype]


def score_gap(target: Target, prompt: list[int], one: list[int], other: list[int], sampling: SamplingParams) -> float:
    """Return the float32 gap between the scores of the two tokens at the first difference; inf if one text ends there.

    The draw takes the token with the largest score: the logit under the repetition penalty, plus at T > 0 the noise of
    that position, times T.
    """
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None:
        return float("inf")
    text = prompt + one[:at]
    logits, _ = target.prefill(target.new_cache(len(text)), text)
    sampling = sampling.over(own_defaults(target.facts.generation, target.name))
    if sampling.repetition_penalty is not None:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[torch.tensor(text)] = True
        logits = penalised(logits, seen, sampling.repetition_penalty)
    pair = torch.tensor([one[at], other[at]])
    scores = logits[pair.to(logits.device)].double().cpu()
    if sampling.temperature > 0:
        scores += sampling.temperature * gumbel(sampling.seed, len(text), pair)
    return float((scores[0] - scores[1]).abs())


def most_turned(exact: Any, rounded: Any, prompt: list[int], text: list[int]) -> float:
    """Return the largest gap between two logits that rounding reverses along a text: wherever another token is the
    likeliest for `rounded`, how much less likely it is for `exact`. Both are transformers' models of the same weights.
    """
    ids = torch.tensor([prompt + text], device=exact.device)
    with torch.inference_mode():
        right, other = (model(ids, logits_to_keep=len(text) + 1).logits[0, :-1].float() for model in (exact, rounded))
    chosen = other.argmax(-1, keepdim=True)
    return float((right.amax(-1) - right.gather(-1, chosen)[:, 0]).max())

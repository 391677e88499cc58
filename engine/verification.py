"""Lossless verification: draw the target's own next token and walk down the tree while it has it.

Every draw is emitted, so the walk is plain decoding; the tree only decides how many draws one forward pays for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.errors import NotANumber
from engine.model.argmax import NAN, argmax
from engine.noise import gumbel_argmax
from engine.sampling import SamplingParams
from engine.tree import TokenTree

_COLDEST = 1e-30  # logits divided by less than this overflow float32, and all infinite scores are equal


class Sampler:
    """Draws a request's tokens one after the other, as `transformers` would: penalty, minimum length, temperature,
    top-k, top-p, min-p, and then Gumbel-max (DESIGN: noise keyed by seed, position and token, not by history).

    answer: tokens drawn already, by an earlier sampler. finish_reason: None while the request runs, then "eos" or
    "length".
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        eos_tokens: Iterable[int],
        vocab_size: int,
        answer: Sequence[int] = (),
    ):
        self.params = params
        self.finish_reason: str | None = None
        self.drawn = len(answer)
        self._position = len(prompt) + len(answer)
        self._eos = sorted(token for token in eos_tokens if token < vocab_size)
        self._seen: Tensor | None = None
        self._penalty = params.repetition_penalty or 1.0
        if self._penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor([*prompt, *answer])] = True
        self._plain = params.temperature == 0 and self._seen is None

    def choices(self, logits: Tensor) -> Tensor | list[int]:
        """What `draw` takes rows of: the logits [nodes, vocab], or their argmax where that settles every draw.

        In place of the argmax stands `NAN` where the logits hold NaN, which argmax takes for the largest.
        """
        if not self._plain or self.drawn < self.params.min_tokens:
            return logits
        return argmax(logits)

    def draw(self, choice: Tensor | int) -> int:
        """The next token, from one row of `choices`. Raises NotANumber if that is no distribution."""
        token = choice if isinstance(choice, int) else self._sample(choice.float())
        if token == NAN:
            raise NotANumber(
                f"logits are not numbers (NaN) at position {self._position}: the model overflows on this text, or its "
                "weights are damaged; try dtype: float32, or get the checkpoint again"
            )
        self.drawn += 1
        self._position += 1
        if self._seen is not None:
            self._seen[token] = True
        if token in self._eos and not self.params.ignore_eos:
            self.finish_reason = "eos"
        elif self.drawn >= self.params.max_tokens:
            self.finish_reason = "length"
        return token

    def _sample(self, logits: Tensor) -> int:
        params = self.params
        if self._seen is not None:
            seen = self._seen = self._seen.to(logits.device)
            logits = penalised(logits, seen, self._penalty)
        if self.drawn < params.min_tokens and self._eos:
            logits = logits.index_fill(0, torch.tensor(self._eos, device=logits.device), -torch.inf)
        if params.temperature == 0:
            token = int(logits.argmax())
        else:
            scores = logits / max(params.temperature, _COLDEST)
            scores = truncate(scores, params.top_k or 0, params.top_p or 1.0, params.min_p or 0.0)
            token = gumbel_argmax(scores, params.seed, self._position)
        return NAN if logits[token].isnan() else token  # NaN counts as the largest in each step before


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """`logits` [vocab] with the repetition penalty on the tokens that were `seen`, [vocab] bool."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def truncate(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """`scores` [vocab] with -inf at the tokens that top-k, top-p and min-p, in this order, rule out."""
    if 0 < top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:
        ascending, tokens = scores.sort()
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[-1] = False
        scores = scores.index_fill(0, tokens[dropped], -torch.inf)
    if min_p > 0:
        chance = scores.softmax(-1)
        scores = scores.masked_fill(chance < min_p * chance.max(), -torch.inf)
    return scores


def verify(tree: TokenTree, logits: Tensor, sampler: Sampler) -> tuple[list[int], list[int]]:
    """Accept the drawn path. logits: [nodes, vocab] in any type, the target's after each node.

    Returns the accepted nodes, root first, and the tokens emitted: the path's below the root, then the bonus token.
    """
    choices = sampler.choices(logits)
    node: int | None = 0
    path, tokens = [], []
    while node is not None:
        path.append(node)
        token = sampler.draw(choices[node])
        tokens.append(token)
        node = None if sampler.finish_reason else tree.child(node, token)
    return path, tokens

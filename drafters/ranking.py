"""Which tokens of a head's output become candidates, and how likely each is to be accepted.

At temperature 0 that is the head's softmax. At T > 0 the target's draw is argmax(z / T + g) over its own logits z,
with noise g that a drafter can compute too. Its logits being close to z, the best guess at the draw is the largest
s = log q / T + g, not the largest q.

How likely is that guess right? The target's z / T differs from the head's by an error the head does not know. If the
errors of the tokens were independent Gumbel variables of scale b, token i would win with probability softmax(s / b)_i
(the Gumbel-max rule once more). So `chance` is that softmax: it is near 1 where the noise has settled the draw by more
than the head's usual error, spread out where it has not, and sums to one over the vocabulary. Ranked by log q alone
it would be softmax(log q / T), which does not know the noise, says too little where the noise agrees with q and too
much where it does not. Both are raw scores: `drafters.calibration` maps them to observed acceptance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.growth import Candidates
from engine.noise import gumbel
from engine.sampling import SamplingParams

ERROR_SCALE = 0.6  # b at T = 1; least log loss for a head whose logits miss the target's by a unit normal error
_KEPT_POSITIONS = 64


class Ranking:
    """Ranks one request's candidates.

    target_ids: [draft_vocab] int64, the target's ids of the head's outputs. shared_noise: whether to use the noise of
    the target's own draw. top_k: candidates per node.
    """

    def __init__(self, sampling: SamplingParams, target_ids: Tensor, top_k: int, shared_noise: bool = True):
        self.sampling, self.target_ids, self.shared_noise = sampling, target_ids, shared_noise
        self.top_k = min(top_k, len(target_ids))
        self.same_ids = bool((target_ids == torch.arange(len(target_ids), device=target_ids.device)).all())
        self._noise: dict[int, Tensor] = {}

    def __call__(self, logits: Tensor, positions: list[int]) -> Candidates:
        """logits: [n, draft_vocab]; positions: [n], the absolute position of the token each row predicts."""
        scores = logits.float()
        temperature = self.sampling.temperature
        if temperature > 0:
            scores = self._truncate(scores / temperature)
            if self.shared_noise:
                scores = (scores + self._noise_at(positions)) / (ERROR_SCALE * max(1.0, 1 / temperature))
        best = scores.topk(self.top_k)
        # one pass over the vocabulary: the maximum is known from the top, so logsumexp need not look for it
        peak = best.values[:, :1]
        chance = (best.values - peak).exp() / (scores - peak).exp().sum(-1, keepdim=True)
        tokens = best.indices if self.same_ids else self.target_ids[best.indices]
        return Candidates(tokens.tolist(), chance.clamp(max=1.0).tolist())

    def _truncate(self, scores: Tensor) -> Tensor:
        """The head's guess at which tokens the request's top-k, top-p and min-p leave to draw from."""
        params, vocab = self.sampling, scores.shape[-1]
        if 0 < params.top_k < vocab:
            scores = scores.masked_fill(scores < scores.topk(params.top_k).values[:, -1:], -torch.inf)
        if params.top_p < 1:
            ascending, tokens = scores.sort(dim=-1)
            dropped = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
            dropped[:, -1] = False
            scores = scores.masked_fill(torch.zeros_like(dropped).scatter_(1, tokens, dropped), -torch.inf)
        if params.min_p > 0:
            chance = scores.softmax(-1)
            scores = scores.masked_fill(chance < params.min_p * chance.amax(-1, keepdim=True), -torch.inf)
        return scores

    def _noise_at(self, positions: list[int]) -> Tensor:
        """[n or 1, draft_vocab]: the target's noise; all nodes of a layer share it, and rounds meet positions again."""
        for position in set(positions) - self._noise.keys():
            noise = gumbel(self.sampling.seed, position, self.target_ids)
            self._noise[position] = noise.to(self.target_ids.device, torch.float32)
        if len(self._noise) > _KEPT_POSITIONS:
            for position in sorted(self._noise.keys() - set(positions))[: -_KEPT_POSITIONS // 2]:
                del self._noise[position]
        if len(set(positions)) == 1:
            return self._noise[positions[0]][None]
        return torch.stack([self._noise[position] for position in positions])

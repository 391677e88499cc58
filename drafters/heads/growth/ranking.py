"""Decides which tokens of a head's output become candidates, and how likely each is to be accepted.

In greedy decoding that is the head's softmax. At T > 0 the target's draw is argmax(z / T + g) over its own logits z,
with noise g that a drafter can compute too. Since its logits are close to z, the best guess at the draw is the largest
s = log q / T + g, not the largest q.

How likely is that guess right? The target's logits differ from the head's by an error the head does not know. If the
errors of the tokens were independent Gumbel variables of scale b, token i would win with probability softmax(s * T /
b)_i (the Gumbel-max rule again). So `prob` is that softmax: near 1 where the noise decides the draw by more than the
head's usual error, spread out where it does not, and it sums to one over the vocabulary. The scale b belongs to the
head, not to the request; `ErrorScale` learns it from the draws that verdicts report, with one gradient step on the log
loss of each. Without the noise `prob` is softmax(log q / T).

Both are raw scores: `drafters.calibration` maps them to observed acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.heads.growth.policies import Candidates
from drafters.heads.top import top
from engine.core.params import SamplingParams
from engine.device import Download, downloaded, uploaded
from engine.model.cuda.usable import runs_kernels
from engine.sampling.noise import gumbel_nearby
from engine.sampling.sampler import truncate

_KEPT_POSITIONS = 64


def _kernels(device: torch.device) -> ModuleType | None:
    """Return `engine.model.cuda.noise_kernels`, None where they cannot run."""
    if device.type == "cpu" or not runs_kernels(device):
        return None
    from engine.model.cuda import noise_kernels

    return noise_kernels


class ErrorScale:
    """How far a head's logits usually miss the target's: b, in logits.

    For heads that miss by a normal error of standard deviation 0.5, 1 and 1.5 the least log loss is at 0.3, 0.6 and 0.8
    (simulated, 8,192 tokens, T from 0.5 to 1). Real heads miss by more: for a barely trained one 1.1 was learned and
    it was still overconfident, hence the initial value.
    """

    def __init__(self, value: float = 1.0):
        self.value = value
        self._unread: list[Drawn] = []
        self._sent: list[Download] = []  # of the draws before these

    def learn(self, one: Drawn) -> None:
        """Learn from a draw; on a GPU only when it is told to `settle`."""
        self._unread.append(one)
        if one.logits.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Learn from all draws so far. On a GPU it learns from those that have arrived: nobody waits for the others,
        which are sent together.
        """
        self._sent += self._surprises()
        while self._sent and self._sent[0].arrived:
            for surprise in self._sent.pop(0).read()[0].tolist():
                if math.isfinite(surprise):  # otherwise the head does not know the token, or truncation ruled it out
                    self._learn(surprise)

    def _surprises(self) -> list[Download]:
        """Send how far the tokens drawn lay below what was expected; see `_learn`."""
        if not (drawn := self._unread):
            return []
        self._unread = []
        ids, device = drawn[0].ranking.target_ids, drawn[0].logits.device
        scores = Ranking.scores_of([(one.ranking, one.logits, [one.position]) for one in drawn])
        expected = (scores.softmax(-1) * scores.clamp(min=-1e9)).sum(-1)
        (tokens,) = uploaded([torch.tensor([[one.token] for one in drawn])], device)
        found = scores.float().masked_fill(ids != tokens, -torch.inf).amax(-1)  # the score of the drawn token
        return [Download([expected - found])]

    def _learn(self, surprise: float) -> None:
        """Learn from one draw. surprise: how far the drawn token's s * T lay below its expectation, in units of b."""
        self.value *= math.exp(max(-0.1, min(0.1, 0.05 * surprise)))
        self.value = max(0.05, min(5.0, self.value))


class Drawn(NamedTuple):
    """The target drew `token` at `position`, for which the head predicted `logits`, [1, draft_vocab]."""

    ranking: Ranking
    logits: Tensor
    position: int
    token: int


class Ranking:
    """Ranks one request's candidates.

    target_ids: [draft_vocab] int64, the target's ids of the head's outputs. shared_noise: whether to use the noise of
    the target's own draw. top_k: candidates per node. error: the head's, shared by its requests.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        target_ids: Tensor,
        top_k: int,
        shared_noise: bool = True,
        error: ErrorScale | None = None,
    ):
        self.sampling, self.target_ids, self.shared_noise = sampling, target_ids, shared_noise
        self.error = error or ErrorScale()
        self.top_k = min(top_k, len(target_ids))
        self.same_ids = bool((target_ids == torch.arange(len(target_ids), device=target_ids.device)).all())
        self._noise: dict[int, Tensor] = {}

    def __call__(self, logits: Tensor, positions: list[int]) -> Candidates:
        """Rank the candidates. logits: [n, draft_vocab]; positions: [n], the absolute position of the token each row
        predicts.
        """
        best = top(self.scores(logits, positions), self.top_k)
        prob = (best.values - best.values[:, :1]).exp_() / best.totals[:, None]
        tokens = best.indices if self.same_ids else self.target_ids[best.indices]
        return Candidates(tokens.tolist(), prob.clamp_(max=1.0).tolist())

    @staticmethod
    def of_all(asked: Sequence[tuple[Ranking, Tensor, list[int]]]) -> list[Candidates]:
        """Return what each ranking makes of its logits and positions, of one head on a GPU. All of it comes to the host
        at once: each result that is read waits for the device.
        """
        rankings = [ranking for ranking, _, _ in asked]
        tokens, probs = downloaded(Ranking.best_of_all(asked))
        counts = [len(logits) for _, logits, _ in asked]
        return [
            Candidates(some[:, : ranking.top_k].tolist(), of_some[:, : ranking.top_k].tolist())
            for ranking, some, of_some in zip(rankings, tokens.split(counts), probs.split(counts), strict=True)
        ]

    @staticmethod
    def best_of_all(
        asked: Sequence[tuple[Ranking, Tensor, list[int]]], keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens after all rows and their probabilities, [rows, most candidates], where the logits
        are. keys: see `scores_of`.
        """
        scores, ids = Ranking.scores_of(asked, keys), asked[0][0].target_ids
        count = max(ranking.top_k for ranking, _, _ in asked)
        if (kernels := _kernels(scores.device)) is not None:
            found: tuple[Tensor, Tensor] = kernels.likeliest(scores, ids, count)
            return found
        best = top(scores, count)
        prob = ((best.values - best.values[:, :1]).exp_() / best.totals[:, None]).clamp_(max=1.0)
        return ids[best.indices], prob

    @staticmethod
    def scores_of(asked: Sequence[tuple[Ranking, Tensor, list[int]]], keys: Tensor | None = None) -> Tensor:
        """Return [rows, draft_vocab]: the `scores` of all, with logits and positions, of one head. On a GPU one kernel
        adds the noise. keys: [rows] int64, its keys, where the device alone knows the positions.
        """
        noisy = [ranking.shared_noise and not ranking.sampling.greedy for ranking, _, _ in asked]
        if (kernels := _kernels(asked[0][1].device) if any(noisy) else None) is None:
            scored = [ranking.scores(logits, positions) for ranking, logits, positions in asked]
            return scored[0] if len(scored) == 1 else torch.cat(scored)
        gains = [
            ranking.sampling.temperature / ranking.error.value if noise else 0.0
            for noise, (ranking, _, positions) in zip(noisy, asked, strict=True)
            for _ in positions
        ]
        if keys is None:
            keys = kernels.noise_keys(
                [(ranking.sampling.seed, position) for ranking, _, at in asked for position in at]
            )
        if any(ranking.truncates for ranking, _, _ in asked):
            scores = torch.cat([ranking.truncated(logits).float() for ranking, logits, _ in asked])
        else:
            by = [[1.0 if r.sampling.greedy else r.sampling.temperature] for r, _, at in asked for _ in at]
            logits = torch.cat([logits for _, logits, _ in asked])
            scores = logits.float() / uploaded([torch.tensor(by, dtype=torch.float32)], logits.device)[0]
        noisy_scores: Tensor = kernels.noisy_scores(scores, asked[0][0].target_ids, keys, gains)
        return noisy_scores

    @property
    def learns(self) -> bool:
        """Whether `learn` has anything to learn from."""
        return not self.sampling.greedy and self.shared_noise

    @property
    def ranks_on_device(self) -> bool:
        """Whether its candidates can be ranked at positions that the device alone knows."""
        return self.sampling.greedy or not self.shared_noise or _kernels(self.target_ids.device) is not None

    @property
    def gain(self) -> float:
        """The factor by which a candidate's score grows with its logit."""
        if self.sampling.greedy:
            return 1.0
        return 1 / self.error.value if self.shared_noise else 1 / self.sampling.temperature

    def learn(self, logits: Tensor, position: int, drawn: int) -> None:
        """Learn from the token that the target drew, if it `learns`; see `Drawn`."""
        self.error.learn(Drawn(self, logits, position, drawn))

    def scores(self, logits: Tensor, positions: list[int]) -> Tensor:
        """Return [n, draft_vocab]: candidates are ranked by these, and their softmax is the probability."""
        if self.sampling.greedy:
            return logits
        scores = self.truncated(logits)
        if self.shared_noise:
            scores = (scores + self._noise_at(positions)) * (self.sampling.temperature / self.error.value)
        return scores

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may rule a token out."""
        params = self.sampling
        return not params.greedy and bool(params.top_k or (params.top_p or 1.0) < 1 or params.min_p)

    def truncated(self, logits: Tensor) -> Tensor:
        """Return logits / temperature, float32, without what top-k, top-p and min-p rule out; greedy, the logits."""
        params = self.sampling
        if params.greedy:
            return logits
        scores = logits.float() / params.temperature
        return truncate(scores, params.top_k or 0, params.top_p or 1.0, params.min_p or 0.0)

    def _noise_at(self, positions: list[int]) -> Tensor:
        """Return [n or 1, draft_vocab]: the target's noise; all nodes of a layer share it, and later rounds need it
        again.
        """
        for position in set(positions) - self._noise.keys():
            self._noise[position] = gumbel_nearby(self.sampling.seed, position, self.target_ids).float()
        if len(self._noise) > _KEPT_POSITIONS:
            for position in sorted(self._noise.keys() - set(positions))[: -_KEPT_POSITIONS // 2]:
                del self._noise[position]
        if len(set(positions)) == 1:
            return self._noise[positions[0]][None]
        return torch.stack([self._noise[position] for position in positions])

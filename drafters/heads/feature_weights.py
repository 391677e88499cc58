"""The weights of heads that predict the target's next feature (the EAGLE family), as their sessions use them."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from drafters.heads.layers import HeadCache, Linear
from drafters.heads.pooled_weights import PooledWeights


class FeatureWeights(PooledWeights):
    """What the sessions of an EAGLE head need of it, also where it has no stack."""

    lm_head: Linear

    @abstractmethod
    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, cache: HeadCache, at: int, mask: Tensor | None
    ) -> Tensor:
        """Return [n, hidden_size]: the features guessed after (feature, token) pairs. at: as in `HeadCache.write`."""

    @abstractmethod
    def logits(self, features: Tensor) -> Tensor:
        """Return logits [n, draft_vocab] of features [n, hidden_size]."""

    @abstractmethod
    def new_cache(self, capacity: int) -> HeadCache:
        """Return a cache of the head's layer."""

"""The weights of heads that predict the target's next feature (the EAGLE family), as their sessions use them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from drafters.heads.head import Head
from drafters.heads.layers import HeadCache, Linear
from drafters.heads.new_stack import AnyStack
from engine.core.batch import Rows


class FeatureWeights(Head):
    """What the sessions of an EAGLE head need of it."""

    hidden_size: int
    dtype: torch.dtype
    lm_head: Linear

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """The target's true features [n, layers, hidden] as the head's own kind, [n, hidden_size]."""

    @abstractmethod
    def forward(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        cache: HeadCache,
        at: int,
        mask: Tensor | None,
    ) -> Tensor:
        """[n, hidden_size]: the features guessed after (feature, token) pairs. at: as in `HeadCache.write`."""

    @abstractmethod
    def logits(self, features: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, draft_vocab]."""

    @abstractmethod
    def new_cache(self, capacity: int) -> HeadCache:
        """A cache of the head's layer."""

    @abstractmethod
    def new_stack(self) -> AnyStack | None:
        """The head's layer and output matrix as a program, None where a stack does not fit."""

    @abstractmethod
    def entered(self, features: Tensor, tokens: Tensor) -> Tensor:
        """The stack's residual for these pairs."""

    @cached_property
    def stack(self) -> AnyStack | None:
        return self.new_stack()

    def guess(self, above: Sequence[int], parts: Sequence[Rows], chosen: Sequence[int] | None) -> Tensor:
        """Logits [chosen, draft_vocab] after pairs of features and the parts' tokens. above: [rows], the slots of the
        pool where the features are kept; the guessed ones are kept in the rows' own slots afterwards.
        """
        assert self.stack is not None
        return self.stack.run(above, parts, chosen)

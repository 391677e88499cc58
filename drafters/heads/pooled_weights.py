"""The weights of heads whose rows of all requests go through one stack (`drafters.heads.pooled_session`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from drafters.heads.head import Head
from drafters.heads.new_stack import AnyStack
from engine.core.batch import Rows


class PooledWeights(Head):
    """A head whose rows for all requests run in one stack. It predicts the next hidden state from a hidden state and
    the token after it, and drafts on from its own prediction.
    """

    hidden_size: int
    dtype: torch.dtype

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's true features [n, layers, hidden] as the head's own kind, [n, hidden_size]."""

    @abstractmethod
    def new_stack(self) -> AnyStack | None:
        """Return the head's layer and output matrix as a program, None where a stack does not fit."""

    @abstractmethod
    def entered(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Return what the stack's rows start from for these pairs."""

    @cached_property
    def stack(self) -> AnyStack | None:
        return self.new_stack()

    def keep(self, features: Tensor, places: Tensor) -> None:
        """Keep true features, [rows, layers, hidden], at these places of the stack's pool, [rows]."""
        assert self.stack is not None
        kept = self.stack.pool.features
        kept.index_copy_(0, places, self.fuse(features.to(self.dtype)).to(kept.dtype))

    def guess(self, above: Sequence[int], parts: Sequence[Rows], chosen: Sequence[int] | None) -> Tensor:
        """Return logits [chosen, draft_vocab] after pairs of features and the parts' tokens. above: [rows], the slots
        of the pool where the features are kept; the guessed ones are kept in the rows' own slots afterwards.
        """
        assert self.stack is not None
        return self.stack.run(above, parts, chosen)

"""Heads that draft by predicting the target's next feature (the EAGLE family), and their sessions.

The feature f[i] of text position i is paired with the token t[i + 1] after it; one layer turns the pair into a guess
at f[i + 1], from which the next token's logits come. Pairs with the target's true features fill the first cache
slots; pairs of drafted nodes, whose features are the head's own guesses, follow them and are dropped at the next
sync. A layer of the tree is one forward: a mask lets each node see the text and its ancestors.

Where a head has a stack, `drafters.heads.pooled_session` does the same for all requests at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafters.heads.growth.behind import DraftsBehind
from drafters.heads.growth.policies import Policy
from drafters.heads.layers import HeadCache, Linear, causal_mask
from drafters.heads.pooled_session import PooledSession, PooledWeights
from drafters.heads.session import ReadingSession, Session
from engine.core.drafter_protocol import DeviceVerdicts

_SYNC_CHUNK = 512  # rows of one forward over a long prompt, which bounds the mask's size


class FeatureHead(PooledWeights):
    """What the EAGLE heads have in common: all but the layer itself."""

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

    @property
    def drafts_ahead(self) -> bool:
        return hasattr(self.stack, "draft_ahead")

    def draft_ahead(self, tries: Sequence[Any], policy: Policy) -> None:
        stack: Any = self.stack  # one that has the method
        roots = self.roots([trie.session for trie in tries])
        stack.draft_ahead(tries, roots, policy)

    def draft_behind(self, tries: Sequence[Any], verdicts: DeviceVerdicts, policy: Policy) -> DraftsBehind:
        stack: Any = self.stack
        launched: DraftsBehind = stack.draft_behind(self.keep, tries, verdicts, policy)
        return launched

    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> Session:
        if self.stack is not None:
            return PooledSession(self, scratch)
        return FeatureSession(self, capacity, scratch)


class FeatureSession(ReadingSession):
    """One request of a `FeatureHead`; node n > 0 occupies the cache slot `slots + n - 1`."""

    def __init__(self, head: FeatureHead, text: int, scratch: int):
        super().__init__()
        self.head, self.scratch = head, scratch
        self.cache = head.new_cache(text + scratch)
        self.slots = 0  # cache slots that hold true features
        self.nodes = 1
        # For each node: its predicted feature, the position of its pair, and what it may attend to.
        self.features = torch.empty(scratch + 1, head.hidden_size, device=head.device, dtype=head.dtype)
        self.positions = [0] * (scratch + 1)
        # One row per node over the cache slots, so that a layer's mask is a slice and need not be assembled.
        self.visible = torch.zeros(scratch + 1, text + scratch, dtype=torch.bool, device=head.device)
        self._root_logits: Tensor | None = None

    def root(self) -> Tensor:
        if self._unread:
            positions = [start + i for start, _, tokens in self._unread for i in range(len(tokens))]
            features = torch.cat([features for _, features, _ in self._unread])
            tokens = [token for _, _, tokens in self._unread for token in tokens]
            for at in range(0, len(tokens), _SYNC_CHUNK):
                chunk = slice(at, at + _SYNC_CHUNK)
                self._sync(positions[chunk], features[chunk], tokens[chunk])
            self._unread.clear()
            self._root_logits = None
        if self._root_logits is None:
            self._root_logits = self.head.logits(self.features[:1])
        return self._root_logits

    def extend(self, parents: list[int], tokens: list[int]) -> tuple[list[int], Tensor]:
        n, first, head = len(tokens), self.nodes, self.head
        start = self.slots + first - 1
        positions = [self.positions[parent] + 1 for parent in parents]
        self.positions[first : first + n] = positions
        self.nodes += n
        nodes = list(range(first, first + n))
        # One transfer serves all three.
        rows, ids, at = torch.tensor([parents, tokens, positions], device=head.device).unbind()
        visible = self.visible[first : first + n]
        visible.copy_(self.visible.index_select(0, rows))
        visible[:, start : start + n].fill_diagonal_(True)
        mask = visible[:, : start + n]
        features = head.forward(self.features.index_select(0, rows), ids, at, self.cache, start, mask)
        self.features[first : first + n] = features
        return nodes, head.logits(features)

    def room(self) -> int:
        return self.scratch - (self.nodes - 1)

    def clear(self) -> None:
        self.nodes = 1

    def _sync(self, positions: list[int], features: Tensor, tokens: list[int]) -> None:
        """Read the pairs with true features at these positions of the text."""
        n, head = len(tokens), self.head
        guessed = head.forward(
            head.fuse(features.to(head.device, head.dtype)),
            torch.tensor(tokens, device=head.device),
            torch.tensor(positions, device=head.device),
            self.cache,
            self.slots,
            causal_mask(n, self.slots, head.device) if n > 1 else None,
        )
        self.slots += n
        self.visible[0, : self.slots] = True  # the row that all others are copied from
        self.features[0], self.positions[0] = guessed[-1], positions[-1]

"""Drafts that a GPU begins right after the target's walk down the trees, before the host knows how the walk ended.

The head reads as many rows of each text as may have been accepted. Rows past the end of the walk read zeros, and write
to slots that no other row sees, because the drafted rows begin behind all of them. Only how much of the text the
drafted rows see, and their positions, depend on the walk. Once the host knows what the round accepted, it enters what
was drafted for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.heads.growth.trie import Trie
from engine.core.drafter_protocol import DeviceVerdicts
from engine.device import PackedDownload
from engine.sampling.noise_bits import keys_from

Enter = Callable[[list[tuple[int, Trie]], list[Tensor]], None]
"""Enters drafts that have come to the host: of the trees with these indices, each in its trie."""


class DraftsBehind:
    """The drafts that a device makes for the result of a round. found: what `enter` takes. sent: on its way to the
    host.
    """

    def __init__(self, tries: Sequence[Trie], verdicts: DeviceVerdicts, found: Sequence[Tensor], enter: Enter):
        self._tries, self._enter = tries, enter
        self.sent = PackedDownload([verdicts.lengths, verdicts.tokens, *found])

    def enter(self, tries: Sequence[Trie]) -> list[Trie]:
        """Enter what was drafted for each trie whose text is what the device took it to be, and return the other tries.
        The host has drawn a token for these itself, or has read more; their sessions then read as without drafts.
        """
        lengths, tokens, *found = self.sent.read()
        came = [
            (tree, trie)
            for tree, trie in enumerate(self._tries)
            if trie in tries and _came_to(trie.session, tokens[tree, : int(lengths[tree])])
        ]
        self._enter(came, found)
        entered = {trie for _, trie in came}
        return [trie for trie in tries if trie not in entered]


def _came_to(session: Any, tokens: Tensor) -> bool:
    """Return whether the round emitted the tokens that the device drew. `benchmarks.gpu.counts` replaces this."""
    return bool(session.unread_tokens == tokens.tolist())


def noise_keys(tries: Sequence[Trie], count: int) -> Tensor:
    """Return [trees, count] int64: the keys of each text's noise, from the position after its shortest walk on. The
    result is empty if no request samples.
    """
    samplings = [trie.ranking.sampling for trie in tries]
    if all(sampling.greedy for sampling in samplings):
        return torch.empty(0, dtype=torch.int64)
    begins = [trie.session.synced + 2 for trie in tries]
    keys = [keys_from(one.seed, begin, count) for one, begin in zip(samplings, begins, strict=True)]
    return torch.from_numpy(np.stack(keys).view(np.int64))


def keys_after(keys: Tensor, verdicts: DeviceVerdicts, count: int) -> Tensor:
    """Return [trees, count] int64: the keys from the end of each walk on."""
    steps = torch.arange(count, device=keys.device)
    return keys.gather(1, (verdicts.lengths - 1).long()[:, None] + steps)

"""Computes the blocks of one-pass heads behind the walks of a round (`drafters.heads.growth.behind`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.heads.growth.behind import DraftsBehind, keys_after, noise_keys
from drafters.heads.growth.ranking import Ranking
from drafters.heads.growth.trie import Trie
from drafters.heads.one_pass.block_weights import BlockWeights
from drafters.heads.top import top
from engine.core.drafter_protocol import DeviceVerdicts
from engine.device import uploaded


def draft_behind(head: BlockWeights, tries: Sequence[Trie], verdicts: DeviceVerdicts) -> DraftsBehind:
    """Let the head read what a round accepts, and compute the next block of each trie. The sessions have read all of
    their texts before the round.
    """
    (trees, most), size, depth, vocab = verdicts.tokens.shape, head.size, head.depth, len(head.target_ids)
    stack: Any = head.stack
    sessions: list[Any] = [trie.session for trie in tries]
    slots = np.concatenate([session.places(most) for session in sessions])
    positions = [position for session in sessions for position in range(session.synced, session.synced + most)]
    assert head.reader is not None
    head.reader.read(verdicts.features.flatten(0, 1).flatten(1), positions, slots)
    step = stack.step([session.rows([()], most) for session in sessions])
    picked = [tree * size + row for tree in range(trees) for row in head.predicting(())]
    before = torch.arange(trees) * most - 1
    on_host = [step.given, step.rows.listed, torch.from_numpy(slots.astype(np.int64)), before, torch.tensor(picked)]
    given, listed, places, last, chosen, keys = uploaded(
        [*on_host, noise_keys(tries, most + depth)], verdicts.lengths.device
    )
    last = last + verdicts.lengths
    rows = given[:, : trees * size].view(-1, trees, size)  # as after the longest walk, until the next lines
    rows[0, :, 0] = verdicts.tokens.flatten().index_select(0, last)
    rows[1] = places.index_select(0, last)[:, None]
    rows[2:] += (verdicts.lengths - most)[:, None]
    multiplied = step.run(given, listed, chosen)
    asked = [
        (trie.ranking, logits, [0] * depth)
        for trie, logits in zip(tries, multiplied[:, :vocab].split(depth), strict=True)
    ]
    gains = [trie.ranking.gain for trie in tries]
    scores = Ranking.scores_of(asked, keys_after(keys, verdicts, depth).flatten() if keys.numel() else None)

    def enter(came: list[tuple[int, Trie]], found: list[Tensor]) -> None:
        beside, *best = found
        for tree, trie in came:
            session: Any = trie.session
            own = slice(tree * depth, (tree + 1) * depth)
            session.has_read(session.count_unread())
            session.add([()], head.outputs(multiplied[own, :vocab], beside[own]))
            session.blocks[0].forward.take(gains[tree], *(part[own] for part in best))

    return DraftsBehind(tries, verdicts, [multiplied[:, vocab:], *top(scores, min(head.candidates, vocab))], enter)

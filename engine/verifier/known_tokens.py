"""What is drawn at the nodes of all trees of a round, where it can be known before anyone walks down a tree.

On a GPU every result that is read waits for the device, so all draws of a round are one kernel and one copy to the
host, and so are the hidden states of the paths that they will accept. On a CPU the walk draws at the nodes it reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.core.hidden_states import States
from engine.core.tree import TokenTree
from engine.device import uploaded
from engine.model.runner import bfloat16_bits
from engine.sampling.argmax import argmax
from engine.sampling.sampler import Sampler

_SMALL = 8  # nodes of a tree of which the argmax is found without knowing whether it is needed

Known = Sequence[int] | None
"""[nodes] the token drawn at each node of a tree (`engine.sampling.sampler.LogitsView`), if that is known."""


def known_tokens(trees: Sequence[TokenTree], samplers: Sequence[Sampler], logits: Tensor) -> list[Known]:
    """What each sampler draws at the nodes of its tree. logits: [rows, vocab], the trees' one after the other."""
    known: list[Known] = [None] * len(trees)
    begins = [0, *accumulate(map(len, trees))]
    # one call for all nodes, since a call takes longer than a row's argmax; but of a large tree few nodes are drawn
    # from, and on a CPU the logits of the others need not be read
    at_once = logits.device.type != "cpu" or len(logits) <= _SMALL * len(trees)
    greedy = [i for i, sampler in enumerate(samplers) if sampler.params.greedy]
    if at_once and greedy:
        best = argmax(logits)
        for i in greedy:
            known[i] = best[begins[i] : begins[i + 1]]
    sampled = [i for i, sampler in enumerate(samplers) if sampler.is_plain and not sampler.params.greedy]
    if logits.device.type != "cpu" and sampled:
        _draw([(trees[i], samplers[i], begins[i]) for i in sampled], logits, sampled, known)
    return known


def _draw(
    parts: Sequence[tuple[TokenTree, Sampler, int]], logits: Tensor, places: Sequence[int], known: list[Known]
) -> None:
    """Draw at all nodes of some trees, each given with its sampler and its first row. known: filled in at `places`."""
    try:
        from engine.model.cuda.noise_kernels import Draw, drawn
    except ImportError:  # no Triton: the walk draws node by node
        return
    draws = [
        Draw(first + node, sampler.params.temperature, sampler.params.seed, sampler.position + depth)
        for tree, sampler, first in parts
        for node, depth in enumerate(tree.depths.tolist())
    ]
    tokens = iter(drawn(logits, draws))
    for place, (tree, _, _) in zip(places, parts, strict=True):
        known[place] = [next(tokens) for _ in range(len(tree))]


class RowStates:
    """The hidden states of a forward's rows as the host gets them. states: [rows, layers, hidden]. expected: the rows
    that will be asked for, which a GPU sends together; others are sent when they are asked for.
    """

    def __init__(self, states: Tensor, expected: Sequence[int]):
        self._states = states
        self._on_host = states.device.type == "cpu"
        self._sent = bfloat16_bits(states if self._on_host else self._picked(expected))
        self._places = {row: place for place, row in enumerate(expected)}

    def of(self, rows: Sequence[int]) -> States:
        """[rows, layers, hidden]"""
        if self._on_host:
            return self._sent[list(rows)]
        if all(row in self._places for row in rows):
            return self._sent[[self._places[row] for row in rows]]
        return bfloat16_bits(self._picked(rows))

    def _picked(self, rows: Sequence[int]) -> Tensor:
        (picked,) = uploaded([torch.from_numpy(np.asarray(rows, np.int64))], self._states.device)
        return self._states.index_select(0, picked)


def row_states(states: Tensor | None, trees: Sequence[TokenTree], known: Sequence[Known]) -> RowStates | None:
    """Those of trees' rows, with the paths that are known to be accepted. states: [rows, layers, hidden], None if
    nobody wants them.
    """
    if states is None:
        return None
    firsts = [0, *accumulate(map(len, trees))]
    found = zip(firsts, trees, known, strict=False)
    return RowStates(states, [first + n for first, tree, some in found if some is not None for n in tree.walk(some)])

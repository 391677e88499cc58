"""Selects one layer of trees that grow on a GPU: the nodes to draft next, by `Dynamic`'s rule, without
asking the host.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class GrownLayer(NamedTuple):
    """Nodes of trees of a layer, the same number of each tree, on the device.

    confidence: [nodes] float64, of their paths. places: [nodes] int64, where in the pool their features are.
    ancestors: [nodes, depth] int32, the slots of the nodes that each one sees; as many as its layer has count.
    """

    confidence: Tensor
    places: Tensor
    ancestors: Tensor


class NextLayer(NamedTuple):
    """The nodes of trees that are drafted next.

    tokens, read: [rows] int64, the nodes' own tokens and where their parents' features are; rows that pad a forward are
    zeros. parents: [nodes] int32, which node of its tree's layer before each one is below.
    """

    tokens: Tensor
    read: Tensor
    parents: Tensor
    confidence: Tensor
    ancestors: Tensor


@triton.jit(do_not_specialize=["nodes", "columns", "layer", "depth"])
def _select(
    tokens,  # [trees * nodes, columns] int64: what may follow each node, likeliest first
    prob,  # [trees * nodes, columns] float32
    confidence,  # [trees * nodes] float64
    places,  # [trees * nodes] int64
    ancestors,  # [trees * nodes, depth] int32
    slots,  # [trees] int32: of each tree's first node of the new layer
    next_tokens,  # out, and so on: see `NextLayer`
    read,
    parents,
    next_confidence,
    next_ancestors,
    nodes,
    columns,
    layer,
    depth,
    WIDTH: tl.constexpr,
    FILLED: tl.constexpr,
):
    """Select the WIDTH best of a tree's candidates, the earlier of equals."""
    tree = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, FILLED)
    there = candidate < nodes * WIDTH
    node = tree * nodes + candidate // WIDTH
    at = node * columns + candidate % WIDTH
    above = tl.load(confidence + node, mask=there, other=0.0)
    chance = above * tl.load(prob + at, mask=there, other=0.0).to(tl.float64)
    chance = tl.where(there & (chance == chance), chance, -1.0)
    better = (chance[:, None] > chance[None, :]) | (
        (chance[:, None] == chance[None, :]) & (candidate[:, None] < candidate[None, :])
    )
    rank = tl.sum(better.to(tl.int32), 0)
    kept = there & (rank < WIDTH)
    place = tree * WIDTH + rank
    tl.store(next_tokens + place, tl.load(tokens + at, mask=there, other=0), mask=kept)
    tl.store(read + place, tl.load(places + node, mask=there, other=0), mask=kept)
    tl.store(parents + place, candidate // WIDTH, mask=kept)
    tl.store(next_confidence + place, chance, mask=kept)
    for step in range(layer):
        seen = tl.load(ancestors + node * depth + step, mask=there, other=0)
        tl.store(next_ancestors + place * depth + step, seen, mask=kept)
    tl.store(next_ancestors + place * depth + layer, tl.load(slots + tree) + rank, mask=kept)


def select(
    tokens: Tensor, prob: Tensor, above: GrownLayer, slots: Tensor, layer: int, width: int, rows: int
) -> NextLayer:
    """Select the layer of that number, `width` nodes of each tree. tokens, prob: [nodes of the layer before, columns].
    slots: [trees] int32, of each tree's first new node. rows: of the forward that drafts them.
    """
    trees, device = len(slots), tokens.device
    nodes = len(tokens) // trees
    given = torch.zeros(2, rows, dtype=torch.int64, device=device)
    parents = torch.empty(trees * width, dtype=torch.int32, device=device)
    found = NextLayer(
        given[0], given[1], parents, parents.new_empty(len(parents), dtype=torch.float64),
        parents.new_empty(len(parents), above.ancestors.shape[1]),
    )  # fmt: skip
    _select[(trees,)](
        tokens, prob, above.confidence, above.places, above.ancestors, slots, *found, nodes, tokens.shape[1], layer,
        above.ancestors.shape[1], WIDTH=width, FILLED=triton.next_power_of_2(nodes * width),
    )  # fmt: skip
    return found

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


class Grounds(NamedTuple):
    """What trees grow on, on the device, [trees] int64: how many slots of its text each tree's nodes see, the position
    of its root's pair, and where in the pool the root's feature is.
    """

    prefixes: Tensor
    positions: Tensor
    places: Tensor


class TreeLayer(NamedTuple):
    """Nodes of trees of a layer, the same number of each tree, on the device.

    confidence: [nodes] float64, of their paths. places: [nodes] int64, where in the pool their features are.
    ancestors: [nodes, depth] int32, the slots of the nodes that each one sees; as many as its layer has count.
    """

    confidence: Tensor
    places: Tensor
    ancestors: Tensor


class NextLayer(NamedTuple):
    """The nodes of trees that are drafted next.

    rows: [4, rows] int64, of the forward that drafts them: the nodes' own tokens, where their parents' features are,
    their positions, and how many slots of the text they see; rows that pad it are zeros. parents: [nodes] int32, which
    node of its tree's layer before each one is below.
    """

    rows: Tensor
    parents: Tensor
    confidence: Tensor
    ancestors: Tensor


@triton.jit(do_not_specialize=["nodes", "columns", "layer", "depth", "rows"])
def _select(
    tokens,  # [trees * nodes, columns] int64: what may follow each node, likeliest first
    prob,  # [trees * nodes, columns] float32
    confidence,  # [trees * nodes] float64
    places,  # [trees * nodes] int64
    ancestors,  # [trees * nodes, depth] int32
    slots,  # [trees] int32: of each tree's first node of the new layer
    prefixes,  # see `Grounds`
    positions,
    next_rows,  # out, and so on: see `NextLayer`
    parents,
    next_confidence,
    next_ancestors,
    nodes,
    columns,
    layer,
    depth,
    rows,
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
    tl.store(next_rows + place, tl.load(tokens + at, mask=there, other=0), mask=kept)
    tl.store(next_rows + rows + place, tl.load(places + node, mask=there, other=0), mask=kept)
    tl.store(next_rows + 2 * rows + place, tl.load(positions + tree) + 1 + layer, mask=kept)
    tl.store(next_rows + 3 * rows + place, tl.load(prefixes + tree), mask=kept)
    tl.store(parents + place, candidate // WIDTH, mask=kept)
    tl.store(next_confidence + place, chance, mask=kept)
    for step in range(layer):
        seen = tl.load(ancestors + node * depth + step, mask=there, other=0)
        tl.store(next_ancestors + place * depth + step, seen, mask=kept)
    tl.store(next_ancestors + place * depth + layer, tl.load(slots + tree) + rank, mask=kept)


def select(
    tokens: Tensor, prob: Tensor, above: TreeLayer, grounds: Grounds, slots: Tensor, layer: int, width: int, rows: int
) -> NextLayer:
    """Select the layer of that number, `width` nodes of each tree. tokens, prob: [nodes of the layer before, columns].
    slots: [trees] int32, of each tree's first new node. rows: of the forward that drafts them.
    """
    trees, device = len(slots), tokens.device
    nodes = len(tokens) // trees
    parents = torch.empty(trees * width, dtype=torch.int32, device=device)
    found = NextLayer(
        torch.zeros(4, rows, dtype=torch.int64, device=device), parents,
        parents.new_empty(len(parents), dtype=torch.float64),
        parents.new_empty(len(parents), above.ancestors.shape[1]),
    )  # fmt: skip
    _select[(trees,)](
        tokens, prob, above.confidence, above.places, above.ancestors, slots, grounds.prefixes, grounds.positions,
        *found, nodes, tokens.shape[1], layer, above.ancestors.shape[1], rows, WIDTH=width,
        FILLED=triton.next_power_of_2(nodes * width),
    )  # fmt: skip
    return found

"""Which outcomes of the round under way to draft for.

A round ends at node v if v is accepted and none of its children is; the token drawn there is then one that the drafter
had left out. So the outcome (v, token) has the chance (c(v) - sum of c over v's children) * p(token | v, no child),
where p comes from the drafter's own candidates behind v.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from engine.tree import TokenTree

Following = tuple[list[int], list[float]]
"""Tokens that may come next, likeliest first, and their chances."""


class Outcome(NamedTuple):
    """The round may end at `node` with the bonus token `token`."""

    node: int
    token: int
    chance: float


def likeliest(
    tree: TokenTree, following: Callable[[Sequence[Sequence[int]]], list[Following]], limit: int, least: float = 0.005
) -> list[Outcome]:
    """The `limit` likeliest outcomes of a round over `tree`, best first, those of a chance below `least` left out.

    following: what a drafter foresees behind each of some continuations of the text.
    """
    ends = tree.confidence.astype(np.float64)
    np.subtract.at(ends, tree.parents[1:], tree.confidence[1:])
    nodes = [int(node) for node in np.argsort(-ends, kind="stable")[:limit] if ends[node] >= least]
    outcomes = []
    for node, (tokens, chances) in zip(nodes, following([tree.path_tokens(v)[1:] for v in nodes]), strict=True):
        new = [(token, p) for token, p in zip(tokens, chances, strict=True) if tree.child(node, token) is None]
        drafted = sum(chances) - sum(p for _, p in new)
        outcomes += [Outcome(node, token, ends[node] * min(1.0, p / max(1 - drafted, 1e-6))) for token, p in new]
    return heapq.nlargest(limit, (o for o in outcomes if o.chance >= least), key=lambda outcome: outcome.chance)

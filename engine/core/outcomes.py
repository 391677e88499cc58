"""Ranks the outcomes of the round under way that are worth drafting for.

A round ends at node v if v is accepted and none of its children is; the token drawn there is then one that the drafter
had left out. So the outcome (v, token) has the probability (c(v) - sum of c over v's children) * p(token | v, no
child), where p comes from the drafter's own candidates after v.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.tree import TokenTree

Following = tuple[list[int], list[float]]
"""Tokens that may come next, likeliest first, and their probabilities."""


class DraftQuery(NamedTuple):
    """Asks for a draft after a request's text and `continuation`, a possible outcome of the round under way."""

    request: int
    continuation: Sequence[int]


class DraftKey(NamedTuple):
    """What a draft is for. It is verified in round `round`, if the round before it ended at `node` of tree `draft` (0:
    the root alone) and the target then drew `token`. A `Draft` calls the tree its `parent`.
    """

    round: int
    draft: int
    node: int
    token: int


class Outcome(NamedTuple):
    """The round of `request` may end at `node` with the bonus token `token`."""

    request: int
    node: int
    token: int
    prob: float


def likeliest(
    trees: Mapping[int, TokenTree],
    following: Callable[[Sequence[DraftQuery]], list[Following]],
    limit: int,
    least: float,
) -> list[Outcome]:
    """Return the likeliest outcomes of the rounds over `trees`, by request, best first: at most `limit` for each
    request, and none with a probability below `least`.

    following: as `Drafter.following`.
    """
    ends = {request: _ends(tree) for request, tree in trees.items()}
    places = [
        (request, int(node))
        for request, prob in ends.items()
        for node in np.argsort(-prob, kind="stable")[:limit]
        if prob[node] >= least
    ]
    outcomes: dict[int, list[Outcome]] = {request: [] for request in trees}
    predicted = following([DraftQuery(request, trees[request].path_tokens(node)[1:]) for request, node in places])
    for (request, node), (tokens, probs) in zip(places, predicted, strict=True):
        tree = trees[request]
        new = [(token, p) for token, p in zip(tokens, probs, strict=True) if tree.child(node, token) is None]
        drafted = sum(probs) - sum(p for _, p in new)
        rest, end = max(1 - drafted, 1e-6), float(ends[request][node])
        outcomes[request] += [Outcome(request, node, token, end * min(1.0, p / rest)) for token, p in new]
    kept = [heapq.nlargest(limit, (o for o in found if o.prob >= least), key=_prob) for found in outcomes.values()]
    return sorted(chain.from_iterable(kept), key=_prob, reverse=True)


def _prob(outcome: Outcome) -> float:
    return outcome.prob


def _ends(tree: TokenTree) -> NDArray[np.float64]:
    """Return [nodes]: the probability that the round ends at each node."""
    ends = tree.confidence.astype(np.float64)
    np.subtract.at(ends, tree.parents[1:], tree.confidence[1:])
    return ends

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.core.tree import TokenTree
from engine.verifier.confidence_scale import ConfidenceScale
from tests.engine.core.test_tree import trees


def chain(*chances: float) -> TokenTree:
    return TokenTree.chain(0, list(range(1, len(chances) + 1)), np.cumprod(chances).tolist())


def test_a_request_that_keeps_more_than_is_promised_is_trusted_more() -> None:
    tree, trust = chain(0.8, 0.8, 0.8), ConfidenceScale()
    assert np.array_equal(trust.worth(tree), tree.confidence)
    for _ in range(20):
        trust.learn(float(trust.worth(tree).sum()), emitted=4)
    assert (trust.worth(tree)[1:] > tree.confidence[1:]).all()


def test_a_request_that_keeps_less_is_trusted_less() -> None:
    tree, trust = chain(0.8, 0.8, 0.8), ConfidenceScale()
    for _ in range(20):
        trust.learn(float(trust.worth(tree).sum()), emitted=1)
    assert (trust.worth(tree)[1:] < tree.confidence[1:]).all()


@given(trees(), st.lists(st.integers(1, 60)))
def test_however_far_a_request_is_trusted_a_tree_stays_one(tree: TokenTree, emitted: list[int]) -> None:
    trust = ConfidenceScale()
    for tokens in emitted:
        trust.learn(float(trust.worth(tree).sum()), tokens)
    worth = trust.worth(tree)
    assert worth[0] == 1 and (worth[1:] <= worth[tree.parents[1:]]).all()

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import Budget, CostCurve, Trust
from engine.tree import TokenTree
from tests.engine.test_tree import trees

STEEP = {1: 0.010, 8: 0.020, 16: 0.040, 32: 0.080}
FLAT = {1: 0.010, 8: 0.0101, 16: 0.0102, 32: 0.0103}


def chain(*chances: float) -> TokenTree:
    return TokenTree.chain(0, list(range(1, len(chances) + 1)), np.cumprod(chances).tolist())


def test_a_sure_chain_is_verified_whole() -> None:
    assert len(Budget(CostCurve(STEEP)).keep(chain(*[0.99] * 15).confidence)) == 16


def test_a_hopeless_tree_is_not_verified_at_all() -> None:
    assert Budget(CostCurve(STEEP)).keep(chain(0.01, 0.01).confidence).tolist() == [0]


def test_where_nodes_cost_nothing_all_are_verified() -> None:
    assert len(Budget(CostCurve(FLAT)).keep(chain(0.5, *[0.9] * 20).confidence)) == 22


def test_a_fast_engine_verifies_less() -> None:
    """What a node costs is the text that could be written in its time."""
    slow, fast = Budget(CostCurve(STEEP)), Budget(CostCurve(STEEP))
    slow.rate, fast.rate = 10.0, 400.0
    tree = chain(*[0.8] * 12)
    assert len(slow.keep(tree.confidence)) > len(fast.keep(tree.confidence))


@given(trees())
def test_what_is_kept_is_a_tree_with_the_root(tree: TokenTree) -> None:
    kept = Budget(CostCurve(STEEP)).keep(tree.confidence).tolist()
    assert kept[0] == 0 and kept == sorted(set(kept))
    assert all(int(tree.parents[node]) in kept for node in kept[1:])


def test_a_forward_costs_what_the_next_larger_size_measured_costs() -> None:
    curve = CostCurve(STEEP)
    assert [curve.seconds(n) for n in (1, 2, 8, 9, 32)] == [0.010, 0.020, 0.020, 0.040, 0.080]
    assert curve.seconds(64) == pytest.approx(0.160)


def test_the_curve_follows_what_forwards_take() -> None:
    curve = CostCurve(STEEP)
    for _ in range(100):
        curve.observe(7, 0.03)
    assert curve.seconds(8) == pytest.approx(0.03, rel=1e-3)


def test_what_slows_one_forward_is_expected_to_slow_the_others() -> None:
    curve = CostCurve(STEEP)
    for _ in range(20):
        curve.observe(8, 1.2 * STEEP[8])
    assert STEEP[32] < curve.seconds(32) < 1.2 * STEEP[32]


def test_a_forward_that_was_interrupted_changes_little() -> None:
    curve = CostCurve(STEEP)
    curve.observe(16, 100 * STEEP[16])
    assert curve.seconds(16) < 1.03 * STEEP[16] and curve.seconds(32) < 1.01 * STEEP[32]


def test_a_smaller_forward_is_never_dearer_than_a_larger_one() -> None:
    curve = CostCurve({1: 0.010, 8: 0.090, 16: 0.040})
    assert curve.seconds(8) == curve.seconds(16) == 0.040


@given(st.floats(0.001, 0.1), st.integers(1, 8))
def test_the_rate_is_that_of_the_rounds_seen(round_s: float, tokens: int) -> None:
    budget = Budget(CostCurve(STEEP))
    for _ in range(300):
        budget.observe(8, tokens, 0.02, round_s)
    assert budget.rate == pytest.approx(tokens / round_s, rel=1e-2)


def test_measuring_stops_before_it_takes_long() -> None:
    tried: list[int] = []

    def forward_s(nodes: int) -> float:
        tried.append(nodes)
        return 0.3 * nodes

    curve = CostCurve.measure(forward_s, largest=60)
    assert set(tried) == {1, 8}
    assert curve.seconds(8) == pytest.approx(2.4)


def test_a_request_that_keeps_more_than_is_promised_is_trusted_more() -> None:
    tree, trust = chain(0.8, 0.8, 0.8), Trust()
    assert np.array_equal(trust.worth(tree), tree.confidence)
    for _ in range(20):
        trust.learn(float(trust.worth(tree).sum()), emitted=4)
    assert (trust.worth(tree)[1:] > tree.confidence[1:]).all()


def test_a_request_that_keeps_less_is_trusted_less() -> None:
    tree, trust = chain(0.8, 0.8, 0.8), Trust()
    for _ in range(20):
        trust.learn(float(trust.worth(tree).sum()), emitted=1)
    assert (trust.worth(tree)[1:] < tree.confidence[1:]).all()


@given(trees(), st.lists(st.integers(1, 60)))
def test_however_far_a_request_is_trusted_a_tree_stays_one(tree: TokenTree, emitted: list[int]) -> None:
    trust = Trust()
    for tokens in emitted:
        trust.learn(float(trust.worth(tree).sum()), tokens)
    worth = trust.worth(tree)
    assert worth[0] == 1 and (worth[1:] <= worth[tree.parents[1:]]).all()

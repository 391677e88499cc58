"""Growth policies, driven by random heads."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.heads.growth.policies import (
    EAGLE_25,
    MEDUSA_63,
    Adaptive,
    Candidates,
    Dynamic,
    Frontier,
    Policy,
    Static,
    TalonPaperPolicy,
    policy_of,
)
from engine.config import DrafterConfig, GrowthConfig
from engine.core.errors import ConfigError
from engine.core.tree import TokenTree

VOCAB = 50


def grow(policy: Policy, root: int, expand: Callable[[Frontier], Candidates]) -> TokenTree:
    """Run one policy to its end."""
    steps = policy.steps(root)
    try:
        frontier = next(steps)
        while True:
            frontier = steps.send(expand(frontier))
    except StopIteration as end:
        tree: TokenTree = end.value
        return tree


class RandomHead:
    """Answers like a head: k distinct tokens per node with falling chances that sum to at most one; always the same
    behind the same path.
    """

    def __init__(self, seed: int, k: int, sharpness: float):
        self.seed, self.k, self.sharpness = seed, k, sharpness
        self.frontiers: list[Frontier] = []
        self.answers: list[Candidates] = []

    def __call__(self, frontier: Frontier) -> Candidates:
        self.frontiers.append(frontier)
        tokens, probs = [], []
        for node in frontier.nodes:
            path = [frontier.builder.tokens[n] for n in ancestors(frontier.builder.parents, node)]
            prob = random.Random(repr((self.seed, path)))
            weights = sorted((prob.random() ** self.sharpness for _ in range(self.k)), reverse=True)
            total = sum(weights) * (1 + prob.random())
            tokens.append(prob.sample(range(VOCAB), self.k))
            probs.append([weight / total for weight in weights])
        self.answers.append(Candidates(tokens, probs))
        return self.answers[-1]


policies = st.one_of(
    st.sampled_from([Static(EAGLE_25), Static(MEDUSA_63), Static([(0,), (1,), (1, 2)])]),
    st.builds(Dynamic, depth=st.integers(0, 5), top_k=st.integers(1, 6), budget=st.integers(1, 30)),
    st.builds(
        TalonPaperPolicy, budget=st.integers(2, 40), width=st.integers(1, 10), mu=st.sampled_from([0.01, 0.03, 0.9])
    ),
    st.builds(
        Adaptive, budget=st.integers(2, 40), top_k=st.integers(1, 10), mu=st.sampled_from([0.01, 0.03, 0.2, 0.9])
    ),
)
heads = st.tuples(st.integers(0, 10**6), st.integers(1, 10), st.sampled_from([0.2, 1.0, 8.0]))


@given(policies, heads)
def test_a_tree_is_well_formed_and_never_over_budget(policy: Policy, head: tuple[int, int, float]) -> None:
    tree = grow(policy, 7, RandomHead(*head))
    assert len(tree) <= policy.budget
    assert tree.tokens[0] == 7
    tree.validate(VOCAB)  # topological order, distinct siblings, falling confidence


@given(policies, heads)
def test_a_policy_expands_each_node_once_after_its_parent_and_within_its_promise(
    policy: Policy, head: tuple[int, int, float]
) -> None:
    answers = RandomHead(*head)
    grow(policy, 7, answers)
    expanded = [node for frontier in answers.frontiers for node in frontier.nodes]
    assert len(expanded) == len(set(expanded)) <= policy.max_expansions
    for frontier in answers.frontiers[1:]:
        assert set(frontier.parents) <= set(expanded)


@given(st.sampled_from([0.03, 0.2]), heads)
def test_every_layer_of_an_adaptive_tree_below_the_first_obeys_the_gate(
    mu: float, head: tuple[int, int, float]
) -> None:
    policy = Adaptive(budget=40, mu=mu)
    tree = grow(policy, 7, RandomHead(*head))
    if len(tree) < policy.budget:
        assert (tree.depths == 1).sum() == min(policy.top_k, head[1])
    for depth in range(2, int(tree.depths.max()) + 1):
        layer = tree.confidence[tree.depths == depth]
        assert (layer >= np.float32(mu) - 1e-7).all()


@given(st.sampled_from([0.0, 0.03, 0.3]), heads)
def test_the_talon_tree_is_that_of_the_papers_algorithm(mu: float, head: tuple[int, int, float]) -> None:
    """Algorithm 2 once more, over paths instead of nodes."""
    policy = TalonPaperPolicy(budget=30, width=4, mu=mu)
    answers, kept, layer, depth = RandomHead(*head), {(): 1.0}, [()], 0
    tree = grow(policy, 7, answers)
    behind = {}
    for frontier, seen in zip(answers.frontiers, answers.answers, strict=True):
        for node, tokens, probs in zip(frontier.nodes, seen.tokens, seen.prob, strict=True):
            path = tuple(frontier.builder.tokens[n] for n in ancestors(frontier.builder.parents, node))[1:]
            behind[path] = list(zip(tokens, probs, strict=True))
    while len(kept) < 30 and layer:
        pool = sorted(((kept[p] * c, (*p, t)) for p in layer for t, c in behind[p]), key=lambda child: -child[0])
        gated = [child for child in pool if child[0] >= mu * pool[0][0]] if depth else pool[:4]
        layer = [path for _, path in gated[: 30 - len(kept)]]
        kept |= {path: c for c, path in gated[: 30 - len(kept)]}
        depth += 1
    found = {tuple(tree.path_tokens(node)[1:]): float(tree.confidence[node]) for node in range(len(tree))}
    assert found == pytest.approx(kept, rel=1e-5)


def ancestors(parents: list[int], node: int) -> list[int]:
    """The path from the root to a node."""
    return [*ancestors(parents, parents[node]), node] if node > 0 else [0]


@given(heads)
def test_the_dynamic_tree_is_the_best_of_all_candidates(head: tuple[int, int, float]) -> None:
    wide = grow(Dynamic(depth=3, top_k=4, budget=10**6), 7, RandomHead(*head))
    narrow = grow(Dynamic(depth=3, top_k=4, budget=12), 7, RandomHead(*head))
    best = sorted(wide.confidence.tolist(), reverse=True)[: len(narrow)]
    assert sorted(narrow.confidence.tolist(), reverse=True) == best


def test_adaptive_trees_are_deep_for_sure_heads_and_shallow_for_unsure_ones() -> None:
    def head(prob: float) -> TokenTree:
        row = [prob] + [(1 - prob) / 9] * 9
        return grow(Adaptive(), 0, lambda f: Candidates([list(range(10))] * len(f.nodes), [row] * len(f.nodes)))

    assert head(0.99).depths.max() > 20
    assert head(0.12).depths.max() == 1
    assert len(head(0.12)) == 11


def test_the_published_trees_have_their_published_sizes_and_say_what_they_need() -> None:
    assert len(EAGLE_25) == 25 and len(MEDUSA_63) == 63
    for paths, top_k in ((EAGLE_25, 4), (MEDUSA_63, 10)):
        policy = Static(paths)
        assert len(grow(policy, 0, RandomHead(1, 10, 1.0))) == len(paths) + 1 == policy.budget
        assert sum(map(len, asked(policy, RandomHead(1, 10, 1.0)))) == policy.max_expansions and policy.top_k == top_k


def test_a_static_tree_takes_the_candidates_at_its_ranks() -> None:
    answers = iter([Candidates([[5, 6, 7]], [[0.5, 0.3, 0.1]]), Candidates([[8, 9]], [[0.5, 0.25]])])
    tree = grow(Static([(0,), (2,), (2, 1)]), 1, lambda _: next(answers))
    assert tree.tokens.tolist() == [1, 5, 7, 9]
    assert tree.parents.tolist() == [-1, 0, 0, 2]
    assert tree.confidence.tolist() == pytest.approx([1, 0.5, 0.1, 0.025])


def sure(*probs: float) -> Callable[[Frontier], Candidates]:
    """A head that sees the same candidates, 1, 2, ..., behind every node."""
    tokens = list(range(1, len(probs) + 1))
    return lambda frontier: Candidates([tokens] * len(frontier.nodes), [list(probs)] * len(frontier.nodes))


def asked(policy: Policy, head: Callable[[Frontier], Candidates]) -> list[list[int]]:
    """The nodes of every frontier that a head is asked about."""
    frontiers: list[list[int]] = []

    def noted(frontier: Frontier) -> Candidates:
        frontiers.append(frontier.nodes)
        return head(frontier)

    grow(policy, 7, noted)
    return frontiers


def test_a_head_is_told_of_every_node_all_that_it_needs() -> None:
    head = RandomHead(1, 2, 1.0)
    grow(Dynamic(depth=2, top_k=2, budget=20), 7, head)
    last = head.frontiers[-1]
    assert len(last.nodes) == 2
    assert last.parents == [last.builder.parents[node] for node in last.nodes]
    assert last.tokens == [last.builder.tokens[node] for node in last.nodes]
    assert last.confidence == [last.builder.confidence[node] for node in last.nodes]
    assert head.frontiers[0].tokens == [7] and head.frontiers[0].confidence == [1.0]


@pytest.mark.parametrize("policy", [Static(EAGLE_25), Dynamic(), Adaptive()])
def test_a_tree_that_no_source_is_named_for_is_marked_with_none(policy: Policy) -> None:
    assert not grow(policy, 7, RandomHead(1, 10, 1.0)).source.any()


def test_published_parameters_are_the_defaults() -> None:
    dynamic, adaptive, talon = Dynamic(), Adaptive(), TalonPaperPolicy()
    assert (dynamic.depth, dynamic.top_k, dynamic.budget) == (7, 10, 60)
    assert (adaptive.budget, adaptive.top_k, adaptive.mu) == (60, 10, 0.03)
    assert (talon.budget, talon.width, talon.mu) == (60, 10, 0.03)


def test_a_configuration_names_the_policy_and_its_parameters() -> None:
    published = Dynamic(1, 2, 3)

    def named(policy: str | None, default: str = "adaptive") -> tuple[type[Policy], dict[str, object]]:
        growth = GrowthConfig.model_validate({"policy": policy, "depth": 4, "top_k": 3, "mu": 0.2, "tree": "medusa_63"})
        found = policy_of(DrafterConfig(budget=64, growth=growth), published, default)
        return type(found), vars(found)

    assert named("static") == (Static, vars(Static(MEDUSA_63)))
    assert named("dynamic") == (Dynamic, vars(Dynamic(4, 3, 64)))
    assert named("talon") == (TalonPaperPolicy, vars(TalonPaperPolicy(64, 3, 0.2)))
    assert named("adaptive") == named(None) == (Adaptive, vars(Adaptive(64, 3, 0.2, 4)))
    assert named("published") == named(None, "published") == (Dynamic, vars(published))


def test_a_policy_whose_trees_are_larger_than_the_budget_is_refused() -> None:
    growth = GrowthConfig(policy="static", tree="medusa_63")
    assert policy_of(DrafterConfig(budget=64, growth=growth), Dynamic()).budget == 64
    words = "drafter.budget=63: the trees of drafter.growth.policy=static have 64 nodes: set drafter.budget=64"
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
        policy_of(DrafterConfig(budget=63, growth=growth), Dynamic())


@given(heads)
def test_talons_rule_needs_no_more_candidates_than_it_asks_for(head: tuple[int, int, float]) -> None:
    policy, answers = TalonPaperPolicy(budget=5), RandomHead(*head)

    def asked_for(frontier: Frontier) -> Candidates:
        seen, k = answers(frontier), policy.top_k
        return Candidates([row[:k] for row in seen.tokens], [row[:k] for row in seen.prob])

    assert grow(policy, 7, asked_for).tokens.tolist() == grow(policy, 7, RandomHead(*head)).tokens.tolist()


def test_an_adaptive_tree_stops_at_its_promise_where_every_layer_has_better_nodes() -> None:
    """Behind the surest node of each layer are ten that are surer than those of the layer before."""

    def head(frontier: Frontier) -> Candidates:
        others = [1e-5 * 2 ** next(depths) * (1 - i / 100) for i in range(10)]
        rows = [[0.9, *others] if token in (7, 0) else [1e-12] * 11 for token in frontier.tokens]
        return Candidates([[*range(11)]] * len(rows), rows)

    policy, depths = Adaptive(budget=12, top_k=11), itertools.count()
    policy.row_tokens = 1e-9
    assert sum(map(len, asked(policy, head))) == policy.max_expansions == 48


@pytest.mark.parametrize(
    ("paths", "lost"), [([(1,), (0, 1)], [0, 1]), ([(0,), (0, 0, 1)], [0, 0, 1]), ([()], []), ([(0,), ()], [])]
)
def test_paths_that_make_no_tree_are_refused(paths: list[tuple[int, ...]], lost: list[int]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{lost} has no parent in the list")):
        Static(paths)


def test_a_dynamic_tree_is_as_deep_as_it_says_and_as_wide_as_its_promise() -> None:
    policy = Dynamic(depth=2, top_k=3, budget=10**6)
    tree = grow(policy, 7, sure(0.4, 0.3, 0.2, 0.1))
    assert tree.depths.max() == 3
    assert sum(map(len, asked(policy, sure(0.4, 0.3, 0.2, 0.1)))) == policy.max_expansions == 1 + 2 * 3


@pytest.mark.parametrize("policy", [Static(EAGLE_25), Dynamic(), Adaptive(), TalonPaperPolicy()])
def test_a_head_that_sees_no_further_ends_the_tree(policy: Policy) -> None:
    assert len(grow(policy, 7, sure())) == 1


def test_the_gate_lets_pass_what_just_reaches_it_and_nodes_below_it_are_not_expanded() -> None:
    tree = grow(Adaptive(mu=0.25), 7, sure(0.5, 0.25, 0.125))
    assert tree.confidence.tolist() == [1.0, 0.5, 0.25, 0.125, 0.25], "layer 0 is ungated; then 0.5 times 0.5 is enough"
    assert asked(Adaptive(mu=0.25), sure(0.5, 0.25, 0.125)) == [[0], [1, 2], [4]]


def test_a_full_tree_asks_on_where_better_nodes_may_be_found_but_for_talons_rule() -> None:
    assert asked(TalonPaperPolicy(budget=3), sure(0.5, 0.4, 0.1)) == [[0]]
    assert asked(Adaptive(budget=3), sure(0.5, 0.4, 0.1)) == [[0], [1]]
    assert asked(Adaptive(budget=3), sure(0.5, 0.5)) == [[0]], "no child would be better than the worst"
    assert grow(Adaptive(budget=4), 7, sure(0.9, 0.1)).depths.max() == 3


@given(heads)
def test_where_a_row_costs_nothing_an_adaptive_tree_is_the_best_of_all_candidates(head: tuple[int, int, float]) -> None:
    free = Adaptive(budget=20, top_k=4)
    free.row_tokens = 0.0
    adaptive, dynamic = (grow(policy, 7, RandomHead(*head)) for policy in (free, Dynamic(19, 4, 20)))
    assert sorted(adaptive.confidence.tolist()) == pytest.approx(sorted(dynamic.confidence.tolist()))


def test_a_node_is_kept_if_it_brings_what_its_row_costs_or_mu_or_half_of_a_dear_rows_cost() -> None:
    sizes = []
    for row_tokens in (0.001, 0.01, 0.03, 0.06, 0.5):
        policy = Adaptive()
        policy.row_tokens = row_tokens
        sizes.append(len(grow(policy, 7, sure(0.3, 0.2))))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[2] == sizes[3] > sizes[4]
    assert len(grow(Adaptive(), 7, sure(0.3, 0.2))) == sizes[2], "what a row costs is unknown"

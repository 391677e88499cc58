from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import ProtocolError
from engine.core.tree import TokenTree, _steps

VOCABULARY = 6


@st.composite
def trees(draw: st.DrawFn, root: int = 0) -> TokenTree:
    """Any well-formed tree over a small vocabulary, so that siblings and merges collide often."""
    tokens, parents, confidence = [root], [-1], [1.0]
    for _ in range(draw(st.integers(0, 20))):
        parent = draw(st.integers(0, len(tokens) - 1))
        token = draw(st.integers(0, VOCABULARY - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        if token not in taken:
            tokens.append(token)
            parents.append(parent)
            confidence.append(confidence[parent] * draw(st.floats(0, 1, width=32)))
    return TokenTree.from_lists(tokens, parents, confidence, draw(st.sampled_from([1, 2, 4])))


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Every path's tokens with its confidence, straight from the definition."""
    found: dict[tuple[int, ...], float] = {}
    keys: list[tuple[int, ...]] = []
    for token, parent, confidence in zip(tree.tokens, tree.parents, tree.confidence, strict=True):
        key = (*(keys[parent] if parent >= 0 else ()), int(token))
        keys.append(key)
        found[key] = float(confidence)
    return found


@given(trees())
def test_ancestors_depths_children_and_tokens_are_those_of_every_nodes_path(tree: TokenTree) -> None:
    assert tree.validate(VOCABULARY) is tree
    for node in range(len(tree)):
        assert set(np.flatnonzero(tree.ancestor_mask[node])) == set(tree.path(node))
        assert all(tree.parents[child] == node for child in tree.children(node))
        assert not node or tree.child(int(tree.parents[node]), int(tree.tokens[node])) == node
    assert [len(tree.path(node)) - 1 for node in range(len(tree))] == tree.depths.tolist()
    assert sum(len(tree.children(node)) for node in range(len(tree))) == len(tree) - 1
    assert {tuple(tree.path_tokens(node)) for node in range(len(tree))} == set(paths(tree))
    assert tree.child(0, VOCABULARY) is None


@given(trees(), st.integers(1, 25))
def test_pruning_keeps_the_most_confident_nodes_with_their_ancestors(tree: TokenTree, budget: int) -> None:
    pruned = tree.prune(budget).validate(VOCABULARY)
    assert len(pruned) == min(budget, len(tree))
    kept, everything = paths(pruned), paths(tree)
    assert kept.items() <= everything.items()
    left_out = [everything[path] for path in everything.keys() - kept.keys()]
    assert not left_out or max(left_out) <= min(kept.values())


@given(trees(), trees())
def test_the_union_holds_the_paths_of_both_and_no_others_and_none_loses_confidence(
    one: TokenTree, other: TokenTree
) -> None:
    union = paths(one.union(other).validate(VOCABULARY))
    assert union.keys() == paths(one).keys() | paths(other).keys()
    for tree in (one, other):
        assert all(union[path] >= confidence - 1e-5 for path, confidence in paths(tree).items())


@given(trees(), st.lists(st.integers(0, 5), max_size=6))
def test_a_graft_is_a_path_from_the_root_and_changes_nothing_that_is_there(tree: TokenTree, tokens: list[int]) -> None:
    grafted = tree.grafted(tokens, 0.5).validate(10**6)
    own = grafted.keep(range(len(tree)))
    for name in ("tokens", "parents", "confidence", "source"):
        assert np.array_equal(getattr(own, name), getattr(tree, name))
    node: int | None = 0
    for token in tokens:
        assert node is not None
        node = grafted.child(node, token)
    assert node is not None
    assert len(grafted) <= len(tree) + len(tokens)
    assert not grafted.source[len(tree) :].any()


def test_agreement_raises_confidence_and_joins_the_sources() -> None:
    one, other = TokenTree.chain(0, [3], [0.5], source=1), TokenTree.chain(0, [3, 4], [0.5, 0.25], source=2)
    union = one.union(other)
    assert union.confidence.tolist() == [1.0, 0.75, 0.375]
    assert union.source.tolist() == [0, 3, 2]


def test_trees_of_different_roots_do_not_merge() -> None:
    with pytest.raises(ValueError, match="different roots"):
        TokenTree.root_only(1).union(TokenTree.root_only(2))


@pytest.mark.parametrize(
    ("tokens", "parents", "confidence", "told"),
    [
        ([], [], [], "tree .*"),
        ([1, 2], [-1], [1, 1], "tree arrays of lengths 2, 1, 2"),
        ([1, 2], [0, 0], [1, 1], "tree .*"),
        ([1, 2, 3], [-1, 2, 0], [1, 1, 1], "tree parents are not in topological order"),
        ([1, 2], [-1, -1], [1, 1], "tree .*"),
        ([1, 2], [-1, 1], [1, 1], "tree parents are not in topological order"),
        ([1, VOCABULARY], [-1, 0], [1, 1], f"tree token outside the vocabulary of {VOCABULARY}"),
        ([1, -1], [-1, 0], [1, 1], f"tree token outside the vocabulary of {VOCABULARY}"),
        ([1, 2, 2], [-1, 0, 0], [1, 0.5, 0.4], "tree has two equal siblings"),
        ([1, 2], [-1, 0], [1, 1.5], "tree confidence is not a path confidence"),
        ([1, 2], [-1, 0], [1, float("nan")], "tree confidence is not a path confidence"),
        ([1, 2, 3], [-1, 0, 1], [1, 0.5, 0.6], "tree confidence is not a path confidence"),
    ],
)
def test_malformed_trees_are_refused_with_what_is_wrong(
    tokens: list[int], parents: list[int], confidence: list[float], told: str
) -> None:
    tree = TokenTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(confidence, np.float32),
        np.zeros(len(tokens), np.uint32),
    )
    with pytest.raises(ProtocolError, match=f"^{told}$"):
        tree.validate(VOCABULARY)


def test_a_root_alone_is_a_whole_tree() -> None:
    root = TokenTree.root_only(4).validate(VOCABULARY)
    assert (root.tokens.tolist(), root.parents.tolist(), root.confidence.tolist()) == ([4], [-1], [1.0])
    assert root.depths.tolist() == [0] and root.path_tokens(0) == [4]


def test_a_tree_that_no_source_is_named_for_is_marked_with_none() -> None:
    assert not TokenTree.chain(0, [1, 2], [0.5, 0.4]).source.any()
    assert TokenTree.chain(0, [1, 2], [0.5, 0.4], source=3).source.tolist() == [0, 3, 3]


def test_nodes_that_no_source_is_named_for_are_marked_with_one() -> None:
    tree = TokenTree.from_lists([5, 6, 7], [-1, 0, 0], [1.0, 0.5, 0.4])
    tree = TokenTree(tree.tokens, tree.parents, tree.confidence, np.array([0, 0, 4], np.uint32))
    marked = tree.marked(2)
    assert marked.source.tolist() == [0, 2, 4] and marked.source.dtype == np.uint32
    kept = (marked.tokens, marked.parents, marked.confidence)
    assert all(a is b for a, b in zip(kept, (tree.tokens, tree.parents, tree.confidence), strict=True))


def test_what_is_cut_or_merged_has_the_types_that_messages_carry() -> None:
    tree = TokenTree.from_lists([0, 1, 2, 3], [-1, 0, 0, 1], [1.0, 0.5, 0.4, 0.3], source=1)
    for made in (tree, tree.prune(3), tree.keep([0, 1]), tree.union(tree), tree.grafted([3, 4], 0.5)):
        arrays = (made.tokens, made.parents, made.confidence, made.source)
        assert [array.dtype for array in arrays] == [np.int32, np.int32, np.float32, np.uint32]


def test_a_tree_that_fits_stays_the_same_object() -> None:
    tree = TokenTree.chain(0, [1, 2], [0.5, 0.4])
    assert tree.prune(3) is tree


def test_of_equals_the_earlier_are_kept() -> None:
    tree = TokenTree.from_lists([100, *range(100)], [-1] + [0] * 100, [1.0] + [0.5, 0.4] * 50)
    assert tree.prune(41).tokens.tolist() == [100, *range(0, 80, 2)]


def test_below_a_node_without_a_chance_no_step_has_one() -> None:
    assert _steps(TokenTree.chain(0, [1, 2, 3], [0.5, 0.0, 0.0])) == [1.0, 0.5, 0.0, 0.0]


def test_a_walk_begins_at_the_root_and_goes_on_as_long_as_a_child_has_the_nodes_token() -> None:
    tree = TokenTree.from_lists([9, 1, 2, 3, 1], [-1, 0, 0, 2, 3], [1.0] * 5)
    assert tree.walk([5, 0, 0, 0, 0]) == [0]
    assert tree.walk([1, 5, 0, 0, 0]) == [0, 1]
    assert tree.walk([2, 5, 3, 1, 1]) == [0, 2, 3, 4]

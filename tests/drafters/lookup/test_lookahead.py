from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.lookup.lookahead import Lookahead
from engine.core.drafter_protocol import Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree


def started(prompt: list[int], **options: int) -> Lookahead:
    drafter = Lookahead(**options)
    drafter.start(1, prompt, SamplingParams())
    return drafter


def step(drafter: Lookahead) -> TokenTree:
    """A round with a target that says t + 1 behind every token t."""
    tree = drafter.propose(1).validate(1000)
    successors = (tree.tokens + 1)[:, None].astype(np.int32)
    drafter.observe(1, Verdict(tree, [0], [int(tree.tokens[0]) + 1], None, successors))
    return tree


def test_the_first_guesses_are_words_of_the_prompt() -> None:
    tree = started([5, 6, 7], columns=4).propose(1)
    assert set(tree.tokens.tolist()) <= {5, 6, 7}
    assert tree.depths.max() == 4


def test_what_the_target_says_behind_a_guess_is_the_columns_next() -> None:
    drafter = started([5], columns=1, ngram=4)
    assert [step(drafter).tokens.tolist() for _ in range(3)] == [[5, 5], [6, 5, 6], [7, 5, 6, 7]]


def test_a_full_column_is_an_ngram_and_drafted_behind_its_first_token() -> None:
    drafter = started([5], columns=1, ngram=3)
    for _ in range(2):
        step(drafter)  # 5 6 7 is known now, and the next token is 7
    tree = drafter.propose(1, [5])
    six = tree.child(0, 6)
    assert six is not None and tree.child(six, 7) is not None
    assert tree.confidence[six] > 0


def test_probes_stand_where_the_published_mask_puts_them() -> None:
    """A guess of level i and column j is 1 + i + j tokens behind the root and sees level 0 up to its column."""
    drafter = started([5], columns=3, ngram=4)
    step(drafter)
    drafter.requests[1].levels = [[10, 11, 12], [20, 21, 22]]
    tree = drafter.propose(1)
    paths = {tuple(tree.path_tokens(node)[1:]) for node in range(1, len(tree))}
    assert paths == {(10,), (10, 20), (10, 11), (10, 11, 21), (10, 11, 12), (10, 11, 12, 22)}


def test_the_oldest_ngrams_make_room() -> None:
    drafter = started([5], columns=1, ngram=2, guesses=3, budget=100)
    for token in range(10, 15):
        drafter._remember(drafter.requests[1], [5, token])
    assert [token for (token,) in drafter.requests[1].pool[5]] == [14, 13, 12]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(4, 130))
def test_the_budget_is_kept_however_long_it_runs(prompt: list[int], budget: int) -> None:
    drafter = started(prompt, budget=budget)
    for _ in range(12):
        assert len(step(drafter)) <= budget


def test_a_verdict_on_another_tree_leaves_the_window_as_it_is() -> None:
    drafter = started([5, 6], columns=3)
    before = [*drafter.requests[1].levels]
    drafter.observe(1, Verdict(TokenTree.root_only(6), [0], [8], None, np.asarray([[8]], np.int32)))
    assert drafter.requests[1].levels == before
    assert drafter.propose(1).tokens[0] == 8

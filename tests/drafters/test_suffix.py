from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafters.base import Verdict
from drafters.suffix import SuffixDrafter
from engine.sampling import SamplingParams
from engine.tree import TokenTree

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def started(text: list[int], **options: int) -> SuffixDrafter:
    drafter = SuffixDrafter(**options)
    drafter.start(1, text, SamplingParams())
    return drafter


@given(TEXTS, st.integers(2, 20), st.integers(1, 6))
def test_every_path_occurred_in_the_text_behind_the_last_token(text: list[int], budget: int, length: int) -> None:
    tree = started(text, budget=budget, length=length).propose(1).validate(4)
    assert len(tree) <= budget and tree.depths.max() <= length
    occurring = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    assert all(tuple(tree.path_tokens(node)) in occurring for node in range(len(tree)))


@given(TEXTS)
def test_a_token_seen_before_is_always_continued(text: list[int]) -> None:
    assert (len(started(text).propose(1)) > 1) == (text[-1] in text[:-1])


@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_text_that_comes_in_pieces_gives_the_tree_of_the_whole(prompt: list[int], more: list[int]) -> None:
    drafter = started(prompt)
    for token in more:
        drafter.observe(1, Verdict(TokenTree.root_only(0), [0], [token]))
    tree, whole = drafter.propose(1), started(prompt + more).propose(1)
    assert tree.tokens.tolist() == whole.tokens.tolist() and tree.confidence.tolist() == whole.confidence.tolist()


@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_an_outcome_asked_about_leaves_no_trace(text: list[int], continuation: list[int]) -> None:
    drafter = started(text)
    before = drafter.propose(1)
    assert drafter.propose(1, continuation).tokens[0] == continuation[-1]
    assert drafter.propose(1).tokens.tolist() == before.tokens.tolist()


def test_the_longer_context_is_trusted_more() -> None:
    tree = started([1, 2, 3, 7, 9, 3, 8, 1, 2, 3], length=1).propose(1)
    chances = dict(zip(tree.tokens.tolist(), tree.confidence.tolist(), strict=True))
    assert chances[7] > chances[8]

from __future__ import annotations

from drafters.lookup.prompt_lookup import PromptLookup
from engine.core.drafter_protocol import Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree


def started(prompt: list[int], **options: int) -> PromptLookup:
    drafter = PromptLookup(**options)
    drafter.start(1, prompt, SamplingParams())
    return drafter


def test_it_copies_what_followed_the_last_tokens() -> None:
    tree = started([1, 2, 3, 4, 5, 1, 2, 3], length=2).propose(1)
    assert tree.path_tokens(len(tree) - 1) == [3, 4, 5]


def test_the_first_match_in_the_context_wins() -> None:
    assert started([7, 1, 7, 2, 7], length=1).propose(1).tokens.tolist() == [7, 1]


def test_longer_matches_are_tried_first() -> None:
    assert started([2, 3, 8, 1, 2, 3, 9, 1, 2, 3], length=1).propose(1).tokens.tolist() == [3, 9]


def test_nothing_to_copy_is_a_bare_root() -> None:
    assert len(started([1, 2, 3]).propose(1)) == 1


def test_what_a_verdict_emits_becomes_text() -> None:
    drafter = started([1, 2, 3], length=1)
    drafter.observe(1, Verdict(TokenTree.root_only(3), [0], [1]))
    assert drafter.propose(1).tokens.tolist() == [1, 2]


def test_an_outcome_asked_about_leaves_no_trace() -> None:
    drafter = started([1, 2, 3], length=1)
    assert drafter.propose(1, [2]).tokens.tolist() == [2, 3]
    assert len(drafter.propose(1)) == 1

from __future__ import annotations

import pytest

from drafters.lookup.prompt_lookup import PromptLookup
from engine.core.drafter_protocol import Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree


def started(prompt: list[int], **options: int) -> PromptLookup:
    drafter = PromptLookup(**options)
    drafter.start(1, prompt, SamplingParams())
    return drafter


@pytest.mark.parametrize(
    ("prompt", "length", "drafted"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [3, 4, 5]),  # what followed the last tokens
        ([7, 1, 7, 2, 7], 1, [7, 1]),  # the first match in the context wins
        ([2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 1, [3, 9]),  # longer matches are tried first
        ([1, 2, 3], 4, [3]),  # nothing to copy
    ],
)
def test_it_copies_what_followed_the_longest_and_earliest_match(
    prompt: list[int], length: int, drafted: list[int]
) -> None:
    assert started(prompt, length=length).propose(1).tokens.tolist() == drafted


def test_an_outcome_asked_about_leaves_no_trace_and_what_a_verdict_emits_becomes_text() -> None:
    drafter = started([1, 2, 3], length=1)
    assert drafter.propose(1, [2]).tokens.tolist() == [2, 3]
    assert len(drafter.propose(1)) == 1
    drafter.observe(1, Verdict(TokenTree.root_only(3), [0], [1]))
    assert drafter.propose(1).tokens.tolist() == [1, 2]

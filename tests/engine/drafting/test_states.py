"""What leads from one state of a request to the next."""

from __future__ import annotations

import math
from collections import deque

import pytest

from engine.core.errors import ProtocolError
from engine.core.outcomes import DraftKey, Outcome
from engine.core.tree import TokenTree
from engine.drafting.states import DraftedRequest, Running, Sent, WantedDraft

TREE = TokenTree.chain(7, [8, 9], [0.9, 0.8])


def running(ahead: bool = True) -> DraftedRequest:
    """Its first tree is verified."""
    request = DraftedRequest(0, 6)
    request.ahead = ahead
    request.conclude(0, [0], [7], root_only=False, due_ns=1)
    request.answer(TREE)
    return request


def state_of(request: DraftedRequest) -> Running:
    assert isinstance(request.state, Running)
    return request.state


def test_a_tree_that_was_wanted_is_what_the_round_runs_over() -> None:
    request = running()
    assert state_of(request).under == Sent(1, TREE) and state_of(request).due_ns == math.inf
    assert request.verified(1) is TREE and request.verified(0).tokens.tolist() == [7]
    assert request.idle is request.state


def test_a_tree_that_was_begun_for_the_outcome_is_kept_and_no_other() -> None:
    request = running()
    mine, other = TokenTree.chain(10, [11], [0.9]), TokenTree.chain(12, [11], [0.9])
    state_of(request).begun |= {DraftKey(2, 1, 2, 10): mine, DraftKey(2, 1, 2, 12): other}
    request.conclude(1, [0, 1, 2], [8, 9, 10], root_only=False, due_ns=5)
    assert request.begun is mine
    request.answer(mine)
    assert request.begun is None


def test_a_root_that_goes_alone_runs_whatever_was_sent_or_wanted() -> None:
    for request, draft in ((DraftedRequest(0, 6), 0), (running(), 1)):
        request.add(DraftKey(2, 1, 0, 10), TREE) if draft else None
        request.conclude(draft, [0], [10], root_only=True, due_ns=5)
        under = state_of(request).under
        assert (under.draft, under.tree.tokens.tolist(), state_of(request).due_ns) == (0, [10], 5)


def test_a_verifier_that_did_not_wait_verified_the_root() -> None:
    request = DraftedRequest(0, 6)
    for token in (7, 8):  # two verdicts, and no tree was sent between them
        request.conclude(0, [0], [token], root_only=False, due_ns=1)
    assert request.state == WantedDraft(DraftKey(2, 0, 0, 8))


def test_a_verdict_about_a_tree_that_is_not_verified_is_refused() -> None:
    request = running()
    request.add(DraftKey(2, 1, 2, 10), TREE)
    for draft in (2, 7):
        with pytest.raises(ProtocolError):
            request.verified(draft)


def test_nothing_is_drafted_ahead_where_nothing_is_left_or_nobody_wants_it() -> None:
    request = running()
    guess = Outcome(1, 2, 10, 0.5)
    state_of(request).guesses = deque([guess])
    assert request.idle is not None
    state_of(request).take(guess)
    assert request.idle is None
    state_of(request).put_back(guess)
    assert request.idle is not None
    request.given_up = True
    assert request.idle is None
    assert running(ahead=False).idle is None

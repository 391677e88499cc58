"""A request as the drafter worker sees it: three states and their transitions.

Reading   its prompt is being read; there is nothing to draft for.
Wanted    the verifier waits for a tree, or will look for one when its turn comes.
Running   the verifier runs a round; trees for its outcomes can be drafted ahead.

Reading --verdict--> Wanted            Wanted --tree sent--> Running          any --verdict "root only"--> Running
Running --verdict, its tree was sent--> Running       Running --verdict, it was not--> Wanted (a miss)
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.errors import ProtocolError
from engine.core.outcomes import DraftKey, Outcome
from engine.core.tree import TokenTree


class Sent(NamedTuple):
    """A tree that the verifier has, and its number."""

    draft: int
    tree: TokenTree


@dataclass(frozen=True)
class Reading:
    """The request's prompt is being read: there is nothing to do."""


@dataclass(frozen=True)
class WantedDraft:
    """The verifier waits for a tree, or will look for one. begun: the partial tree, if drafting ahead was interrupted
    by this outcome.
    """

    outcome: DraftKey
    begun: TokenTree | None = None


@dataclass
class Running:
    """The verifier runs a round, and trees for its outcomes may be drafted.

    under: the tree being verified, number 0 for the root alone. due_ns: when its verdict is expected, inf if unknown.
    guesses: outcomes to draft for, None before they are ranked. ahead: the trees sent, by outcome. begun: trees whose
    drafting was interrupted.
    """

    under: Sent
    due_ns: float
    guesses: deque[Outcome] | None = None
    ahead: dict[DraftKey, Sent] = field(default_factory=dict)
    begun: dict[DraftKey, TokenTree] = field(default_factory=dict)

    def take(self, guess: Outcome) -> None:
        """Remove an outcome that is being drafted for."""
        assert self.guesses is not None
        self.guesses.remove(guess)

    def put_back(self, guess: Outcome) -> None:
        """Return an outcome that could not be drafted for yet."""
        assert self.guesses is not None
        self.guesses.appendleft(guess)


State = Reading | WantedDraft | Running


def after_verdict(state: State, outcome: DraftKey, root_only: bool, due_ns: float) -> State:
    """Return the state after an outcome came true. root_only: the next round is already running and verifies its root
    alone. due_ns: when that round ends, if it is running.
    """
    if root_only:
        return Running(Sent(0, TokenTree.root_only(outcome.token)), due_ns)
    if not isinstance(state, Running):
        return WantedDraft(outcome)
    if (sent := state.ahead.get(outcome)) is not None:
        return Running(sent, due_ns)
    return WantedDraft(outcome, state.begun.get(outcome))


class DraftedRequest:
    """A request that is drafted for, with its state.

    round: the current one. last_token: of its text. drafts: trees sent so far. ahead: whether the verifier wants trees
    while it runs a round. given_up: the drafter failed on it, so only roots are sent.
    """

    def __init__(self, round_: int, last_token: int):
        self.round, self.last_token = round_, last_token
        self.state: State = WantedDraft(DraftKey(round_, 0, 0, last_token)) if round_ else Reading()
        self.drafts = 0
        self.ahead = self.given_up = False

    @property
    def idle(self) -> Running | None:
        """The round whose outcomes may be drafted for, if there are any left."""
        wanted = self.ahead and not self.given_up
        return self.state if wanted and isinstance(self.state, Running) and self.state.guesses != deque() else None

    @property
    def root(self) -> TokenTree:
        """The tree that drafts nothing."""
        return TokenTree.root_only(self.last_token)

    @property
    def begun(self) -> TokenTree | None:
        """The partial tree that is waited for, if there is one."""
        return self.state.begun if isinstance(self.state, WantedDraft) else None

    def verified(self, draft: int) -> TokenTree:
        """Return the tree with the number that a verdict names."""
        if draft == 0:
            return self.root
        if isinstance(self.state, Running) and self.state.under.draft == draft:
            return self.state.under.tree
        raise ProtocolError("verdict is about a draft that the round under way does not verify")

    def catch_up(self, round_: int, last_token: int) -> None:
        """Catch up with rounds before `round_` that ended without a verdict, the last of them with this token."""
        if round_ <= self.round:
            raise ProtocolError("verdict with tokens of earlier rounds is of a known round")
        self.round, self.last_token, self.state = round_, last_token, Reading()

    def conclude(self, draft: int, path: list[int], tokens: list[int], root_only: bool, due_ns: float) -> None:
        """Conclude the round with a verdict: it ended at path's last node, and the next one begins."""
        self.round, self.last_token = self.round + 1, tokens[-1]
        outcome = DraftKey(self.round, draft, path[-1], tokens[-1])
        self.state = after_verdict(self.state, outcome, root_only, due_ns)

    def answer(self, tree: TokenTree) -> tuple[DraftKey, Sent]:
        """Number the tree that was waited for; its round now runs."""
        assert isinstance(self.state, WantedDraft)
        outcome, sent = self.state.outcome, self._number(tree)
        self.state = Running(sent, math.inf)
        return outcome, sent

    def add(self, outcome: DraftKey, tree: TokenTree) -> Sent:
        """Add a tree for an outcome of the running round."""
        assert isinstance(self.state, Running)
        sent = self.state.ahead[outcome] = self._number(tree)
        return sent

    def _number(self, tree: TokenTree) -> Sent:
        self.drafts += 1
        return Sent(self.drafts, tree)

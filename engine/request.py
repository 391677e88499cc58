"""One request's state in the verifier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.batch import Segment, Wanted
from engine.matcher import Matcher
from engine.messages import Array, Draft, TokenLogprob
from engine.sampling import SamplingParams
from engine.target import Target
from engine.tree import TokenTree
from engine.trust import Trust
from engine.verification import Sampler

Outcome = tuple[int, int, int, int]
"""Key of a draft: (round, previous draft, last accepted node, bonus token)."""


class Request:
    """A text that grows. text: prompt and answer; the cache holds all of it but the last token, the root.

    answer: tokens that an earlier verifier, or this one before the request was preempted, has emitted: they are read
    like the prompt, and decoding goes on behind them. read_to: the position up to which the text has to be read before
    it is decoded; cached: positions of it that others had read before. matcher: of its grammar. drafted: whether it
    wants drafts. drafts: by outcome; those of outcomes that did not come true are dropped every round. features: of
    positions read, until a verdict takes them along.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        answer: Sequence[int],
        sampling: SamplingParams,
        target: Target,
        draft_room: int,
        matcher: Matcher | None = None,
    ):
        self.number, self.sampling, self.target = number, sampling, target
        self.text = [*prompt, *answer]
        self.sampler = Sampler(sampling, prompt, target.eos_tokens, target.vocab_size, answer, matcher)
        self.matcher = matcher
        self.draft_room = draft_room
        self.drafted = sampling.speculation is None or not sampling.speculation.off
        self.prompt_logprobs: list[TokenLogprob] = []
        self.cache: Any = target.open_cache(len(prompt) + sampling.max_tokens + draft_room)
        self.read_to = len(self.text) - bool(answer)
        self.has_answer = bool(answer)
        self.cached = 0
        self.trust = Trust()
        self.round = 0
        self.outcome: Outcome = (1, 0, 0, self.text[-1]) if answer else (0, 0, 0, 0)
        self.drafts: dict[Outcome, tuple[Draft, list[Array]]] = {}
        self.features: list[Array] = []
        self.since_ns = self.asked_ns = time.perf_counter_ns()
        self.kept_path: list[int] = []  # of the latest tree, whose keys and values are to be committed
        self.hit = False  # the tree was there when the last verdict fell
        self.alone = False  # the round to come verifies the root alone

    def go_on(self, draft: int, node: int, tokens: list[int]) -> None:
        """A round emitted these tokens; its path through the tree of that number ended at that node."""
        self.text.extend(tokens)
        self.outcome = (self.round + 1, draft, node, tokens[-1])
        self.hit = self.has_draft

    @property
    def reading(self) -> bool:
        """Whether some of its text has to be read before the next token can be drawn."""
        length: int = self.cache.length
        return length < self.read_to

    @property
    def reads_all(self) -> bool:
        """Whether the logits behind every token of its prompt are asked for."""
        return self.sampling.prompt_logprobs is not None and not self.has_answer

    @property
    def to_share(self) -> list[int]:
        """What it has to read that others may have read: of a prompt not the last token, whose logits it draws from."""
        return self.text[: self.read_to - (not self.has_answer)]

    def chunk(self, count: int) -> Segment:
        """The next tokens of its text to read; behind the last of a prompt, logits are wanted to draw from."""
        start: int = self.cache.length
        last = start + count == self.read_to and not self.has_answer
        wanted: Wanted = "all" if self.reads_all else "last" if last else "none"
        return Segment.of_text(self.text[start : start + count], self.cache, wanted)

    def grafts(self, tree: TokenTree) -> list[int]:
        """Tokens to graft onto a draft: what the grammar makes follow, as far as the drafter's budget goes."""
        if self.matcher is None or not self.drafted:
            return []
        room = min(self.draft_room - len(tree), self.target.context - len(self.text))
        return self.matcher.foreseen()[: max(0, room)]

    def admitted(self, tree: TokenTree) -> Array:
        """The nodes of a draft that may be verified: those the grammar lets come, as many as the request's budget."""
        nodes = np.arange(len(tree)) if self.matcher is None else np.flatnonzero(self.matcher.admitted(tree))
        say = self.sampling.speculation
        if say is None or say.budget is None or len(nodes) <= say.budget:
            return nodes
        best = np.argsort(-tree.confidence[nodes], kind="stable")  # ancestors before descendants
        return np.sort(nodes[best[: say.budget]])

    @property
    def has_draft(self) -> bool:
        """Whether the tree of the round to come is there."""
        return self.outcome in self.drafts

    def preempt(self) -> None:
        """Give the blocks back; the text is read again when there is room."""
        self.cache.release()
        if self.has_answer:
            self.read_to = len(self.text) - 1
        else:
            self.features, self.prompt_logprobs, self.cached = [], [], 0  # they come again with the positions

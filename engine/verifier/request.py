"""One request's state in the verifier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.core.batch import Segment, WantedRows
from engine.core.hidden_states import HiddenStates
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.target import Target
from engine.sampling.matcher import Matcher
from engine.sampling.sampler import Sampler
from engine.verifier.draft_choice import DraftChoice
from engine.wire.messages import Array, Draft, TokenLogprob

Outcome = tuple[int, int, int, int]
"""Key of a draft: (round, previous draft, last accepted node, bonus token)."""


class Request:
    """A growing text. text: prompt and answer; the cache holds all of it but the last token, the root.

    answer: tokens already emitted, by an earlier verifier or before a preemption: they are read like the prompt, and
    decoding continues after them. read_to: the position up to which the text must be read before it is decoded; cached:
    positions of it found in the prefix cache; queued_us: how long it waited until it ran first. matcher: of its
    grammar. drafted: whether it wants drafts. drafts: by outcome; those of outcomes that did not come true are dropped
    every round. features: hidden states of its positions, for a draft head.
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
        self.text, self._prompt_length = [*prompt, *answer], len(prompt)
        self.sampler = Sampler(sampling, prompt, target.eos_tokens, target.vocab_size, answer, matcher)
        self.matcher = matcher
        self.draft_room = draft_room
        self.drafted = sampling.speculation is None or not sampling.speculation.off
        self.prompt_logprobs: list[TokenLogprob] = []
        self.cache: Any = target.open_cache(len(prompt) + sampling.max_tokens + draft_room, sampling.tenant)
        self.read_to = len(self.text) - bool(answer)
        self.has_answer = bool(answer)
        self.cached = 0
        self.queued_us: int | None = None
        self.choice = DraftChoice(len(self.text))
        self.waited_s = 0.0  # for its latest draft
        self.round = 0
        self.outcome: Outcome = (1, 0, 0, self.text[-1]) if answer else (0, 0, 0, 0)
        self.drafts: dict[Outcome, tuple[Draft, list[Array]]] = {}
        self.forget_states()
        self.since_ns = self.asked_ns = time.perf_counter_ns()
        self.kept_path: list[int] = []  # accepted path of the latest tree, to be committed to the cache
        self.alone = False  # the next round verifies the root alone
        self.hit = False  # the next tree had arrived at the last verdict
        self.told = 0  # tokens of the text that the drafter knows

    def go_on(self, draft: int, node: int, tokens: list[int]) -> None:
        """A round emitted `tokens`; its path through tree `draft` ended at `node`."""
        self.text.extend(tokens)
        self.outcome = (self.round + 1, draft, node, tokens[-1])
        self.hit = self.has_draft

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self.sampling.max_tokens - (len(self.text) - self._prompt_length)

    @property
    def reading(self) -> bool:
        """Whether some of its text has to be read before the next token can be drawn."""
        length: int = self.cache.length
        return length < self.read_to

    @property
    def reads_all(self) -> bool:
        """Whether the logits after every token of its prompt are requested."""
        return self.sampling.prompt_logprobs is not None and not self.has_answer

    @property
    def to_share(self) -> list[int]:
        """The text to read that others may have read: of a prompt all but the last token, whose logits are needed."""
        return self.text[: self.read_to - (not self.has_answer)]

    def forget_states(self) -> None:
        """Drop the hidden states kept so far."""
        self.features = HiddenStates(shared=self.target.pool is not None)

    @property
    def shares(self) -> bool:
        """Whether it may share blocks with other requests."""
        return not self.reads_all and self.target.pool is not None

    def adopt(self, with_states: bool) -> None:
        """Reuse what others have read of its text. with_states: its drafter needs the hidden states too; of a text that
        is read again it has them, or begins without them.
        """
        needed = with_states and self.drafted and not self.has_answer
        for states in self.cache.adopt(self.to_share, needed):
            self.features.adopt(states)

    def publish(self) -> None:
        """Let other requests find its committed blocks."""
        if self.target.pool is not None:
            self.cache.publish(self.text, self.features.of_block)

    def chunk(self, count: int) -> Segment:
        """The next `count` tokens to read; after the last one of a prompt, logits are wanted to draw from."""
        start: int = self.cache.length
        last = start + count == self.read_to and not self.has_answer
        wanted: WantedRows = "all" if self.reads_all else "last" if last else "none"
        return Segment.of_text(self.text[start : start + count], self.cache, wanted)

    def grafts(self, tree: TokenTree) -> list[int]:
        """Tokens to graft onto a draft: those that the grammar implies, within the drafter's budget."""
        if self.matcher is None or not self.drafted:
            return []
        room = min(self.draft_room - len(tree), self.target.context - len(self.text))
        return self.matcher.foreseen()[: max(0, room)]

    def admitted(self, tree: TokenTree) -> Array:
        """The nodes of a draft that may be verified: those the grammar allows, at most the request's budget."""
        nodes = np.arange(len(tree)) if self.matcher is None else np.flatnonzero(self.matcher.admitted(tree))
        say = self.sampling.speculation
        if say is None or say.budget is None or len(nodes) <= say.budget:
            return nodes
        best = np.argsort(-tree.confidence[nodes], kind="stable")  # ancestors before descendants
        return np.sort(nodes[best[: say.budget]])

    @property
    def has_draft(self) -> bool:
        """Whether the next round's tree has arrived."""
        return self.outcome in self.drafts

    def preempt(self) -> None:
        """Release the blocks; the text is read again when there is room."""
        self.cache.release()
        if self.has_answer:
            self.read_to = len(self.text) - 1
        else:
            self.forget_states()
            self.prompt_logprobs, self.cached = [], 0  # recomputed with the positions

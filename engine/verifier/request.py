"""One request's state in the verifier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.core.batch import Segment, WantedRows
from engine.core.hidden_states import HiddenStates, States
from engine.core.outcomes import DraftKey
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.costs.draft_choice import DraftChoice
from engine.model.target import Target
from engine.sampling.matcher import Matcher
from engine.sampling.sampler import Sampler
from engine.wire.messages import Array, Draft, PromptProgress, TokenLogprob

_KEPT_DRAFTS = 64


class Request:
    """A growing text. text: prompt and answer; the cache holds all of it but the last token, the root.

    answer: tokens already emitted, by an earlier verifier or before a preemption: they are read like the prompt, and
    decoding continues after them. read_to: the position up to which the text must be read before it is decoded; cached:
    positions of it found in the prefix cache; queued_us: how long it waited until it ran first. matcher: of its
    grammar. wants_draft: whether it is to be drafted for. drafts: by outcome; those of outcomes that did not come true
    are dropped every round. features: hidden states of its positions, for a draft head. rows_kept: of the forward under
    way, those whose keys and values `commit` keeps.

    Only these methods change it. A round: `take_draft` of its drafter, `accept` or `read` what a forward gave,
    `end_round`, `commit`.
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
        self.wants_draft = sampling.speculation is None or not sampling.speculation.off
        self.prompt_logprobs: list[TokenLogprob] = []
        self.cache: Any = target.open_cache(len(prompt) + sampling.max_tokens + draft_room, sampling.tenant)
        self.read_to = len(self.text) - bool(answer)
        self.has_answer = bool(answer)
        self.cached = 0
        self.queued_us: int | None = None
        self.choice = DraftChoice(len(self.text))
        self.waited_s = 0.0  # for its latest draft
        self.round = 0
        self.outcome = DraftKey(1, 0, 0, self.text[-1]) if answer else DraftKey(0, 0, 0, 0)
        self.drafts: dict[DraftKey, tuple[Draft, list[Array]]] = {}
        self.forget_hidden_states()
        self.since_ns = self.waiting_since_ns = time.perf_counter_ns()
        self.rows_kept: Sequence[int] = ()
        self.hit = False  # when the last verdict was sent, the tree for it was already here
        self.root_only = False  # the next round verifies the root alone
        self.n_sent = 0  # tokens of the text that the drafter knows

    # Its drafter.

    @property
    def next_round(self) -> int:
        """The number of the round that the next tree is for; 0 while the prompt is read."""
        return self.round + 1 if self.has_answer else 0

    @property
    def has_draft(self) -> bool:
        """Whether the next round's tree has arrived."""
        return self.outcome in self.drafts

    def join_drafter(self) -> None:
        """Forget the drafts of an earlier drafter: the new one drafts from the text so far."""
        self.drafts, self.root_only, self.waiting_since_ns = {}, False, time.perf_counter_ns()
        self.choice = DraftChoice(len(self.text))
        self.outcome = DraftKey(self.next_round, 0, 0, self.text[-1])

    def take_draft(self, draft: Draft, arrays: list[Array]) -> None:
        """File a draft under the outcome it is for; those for an earlier round are dropped."""
        outcome = DraftKey(draft.round, draft.parent, draft.node, draft.token)
        late = draft.round <= self.round or (self.root_only and outcome == self.outcome)
        if not late and len(self.drafts) < _KEPT_DRAFTS:
            self.drafts[outcome] = (draft, arrays)

    def take_unsent(self, emitted: int = 0) -> list[int]:
        """Return the tokens of the text that the drafter does not know, but for the last `emitted`, which its verdict
        carries.
        """
        unsent, self.n_sent = self.text[self.n_sent : len(self.text) - emitted], len(self.text)
        return unsent

    def choose_root_only(self, root_only: bool) -> None:
        """Decide whether the next round verifies the root alone, unless its tree has arrived."""
        self.root_only = root_only and not self.hit

    def note_wait(self, wait_s: float) -> None:
        """Note how long its latest draft was waited for."""
        self.waited_s = wait_s

    # A round.

    def admit(self, now_ns: int) -> None:
        """Let it run from now on, for the first time or again after a preemption."""
        if self.queued_us is None:
            self.queued_us = (now_ns - self.since_ns) // 1000

    def accept(self, rows: list[int], draft: int, node: int, tokens: list[int], states: States | None) -> None:
        """Accept the path of `rows`, which ends at `node` of the tree `draft`, and the `tokens` that were drawn.
        states: [rows, layers, hidden] of the path, if wanted.
        """
        self.rows_kept = rows
        if states is not None:
            self.features.add(self.cache.length, states, unsent=self.wants_draft)
        self.round += 1
        self._go_on(draft, node, tokens)

    def read(self, chunk: Segment, logprobs: Sequence[TokenLogprob], states: States | None) -> bool:
        """Note that a chunk of the text was read, and return whether it was the last one. logprobs: of the prompt's
        tokens after it, if wanted; states: [tokens, layers, hidden].
        """
        self.rows_kept = range(len(chunk))
        self.prompt_logprobs += logprobs
        if states is not None:
            self.features.add(chunk.past, states, unsent=self.wants_draft and not self.has_answer)
        self.waiting_since_ns = time.perf_counter_ns()
        return chunk.past + len(chunk) == self.read_to

    def begin_answer(self, token: int) -> None:
        """Begin the answer with its first token."""
        self.has_answer = True
        self._go_on(0, 0, [token])

    def _go_on(self, draft: int, node: int, tokens: list[int]) -> None:
        """Go on to the next round: a round emitted `tokens`; its path through tree `draft` ended at `node`."""
        self.text.extend(tokens)
        self.outcome = DraftKey(self.round + 1, draft, node, tokens[-1])
        self.hit = self.has_draft

    def end_round(self, now_ns: int) -> None:
        """End the round, whose tokens were sent. Drafts for outcomes that did not come true are dropped."""
        self.drafts = {self.outcome: self.drafts[self.outcome]} if self.hit else {}
        self.since_ns = self.waiting_since_ns = now_ns

    def share_blocks(self) -> None:
        """Let other requests find the full blocks of what was committed."""
        if self.target.pool is not None:
            self.cache.cache_blocks(self.text, self.features.of_block)

    def trim_cache(self) -> None:
        """Release the blocks of the rows that were not committed."""
        if self.target.pool is not None:
            self.cache.trim()

    # Its text and cache.

    def progress(self, now_ns: int, left_s: float) -> PromptProgress:
        """Return how far its prompt is. left_s: the estimated time until the first token."""
        return PromptProgress(
            request=self.number,
            read=self.cache.length,
            total=self._prompt_length,
            cached=self.cached,
            elapsed_us=(now_ns - self.since_ns) // 1000 - (self.queued_us or 0),
            left_us=round(left_s * 1e6),
        )

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

    def forget_hidden_states(self) -> None:
        """Drop the hidden states kept so far."""
        self.features = HiddenStates(shared=self.target.pool is not None)

    @property
    def shares(self) -> bool:
        """Whether it may share blocks with other requests."""
        return not self.reads_all and self.target.pool is not None

    def match_prefix(self, with_hidden_states: bool, now_ns: int) -> None:
        """Reuse what others have read of its text: a preempted request may then continue at once, and the wait for its
        draft starts now. with_hidden_states: its drafter needs the hidden states too; of a text that is read again it
        has them, or begins without them.
        """
        known = self.cache.length
        needed = with_hidden_states and self.wants_draft and not self.has_answer
        for states in self.cache.match_prefix(self.to_share, needed):
            self.features.adopt(states)
        self.cached += self.cache.length - known
        if not self.reading:
            self.waiting_since_ns = now_ns

    def chunk(self, count: int) -> Segment:
        """Return the next `count` tokens to read; after the last one of a prompt, logits are wanted to draw from."""
        start: int = self.cache.length
        last = start + count == self.read_to and not self.has_answer
        wanted: WantedRows = "all" if self.reads_all else "last" if last else "none"
        return Segment.of_text(self.text[start : start + count], self.cache, wanted)

    def forced_tokens(self, tree: TokenTree) -> list[int]:
        """Return the tokens to graft onto a draft: those that the grammar implies, within the drafter's budget."""
        if self.matcher is None or not self.wants_draft:
            return []
        room = min(self.draft_room - len(tree), self.target.context - len(self.text))
        return self.matcher.foreseen()[: max(0, room)]

    def admitted(self, tree: TokenTree) -> Array:
        """Return the nodes of a draft that may be verified: those the grammar allows, at most the request's budget."""
        nodes = np.arange(len(tree)) if self.matcher is None else np.flatnonzero(self.matcher.admitted(tree))
        options = self.sampling.speculation
        if options is None or options.budget is None or len(nodes) <= options.budget:
            return nodes
        best = np.argsort(-tree.confidence[nodes], kind="stable")  # ancestors before descendants
        return np.sort(nodes[best[: options.budget]])

    def preempt(self) -> None:
        """Release the blocks; the text is read again when there is room."""
        self.cache.release()
        if self.has_answer:
            self.read_to = len(self.text) - 1
        else:
            self.forget_hidden_states()
            self.prompt_logprobs, self.cached = [], 0  # recomputed with the positions

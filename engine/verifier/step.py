"""One request's part of a round: its tree before the forward, and what came of it afterwards.

A drafter's tree gets the tokens that the grammar implies, loses those that the grammar forbids, and is cut, over all
requests together, to the nodes that pay. After the forward, the target's own tokens are drawn on the way down. A chunk
of a text that is read needs no step of its own: it is a `Segment`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate

import numpy as np
from torch import Tensor

from engine.core.batch import Segment
from engine.core.methods import GRAMMAR
from engine.core.tree import TokenTree
from engine.costs.constants import GRAFT_PROB
from engine.costs.cost_model import CostModel
from engine.model.kv_pool import KVPool
from engine.sampling.drawn_tree import DrawnTree
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import verify
from engine.verifier.forward_output import Output, output_of
from engine.verifier.request import Request
from engine.wire.messages import Array, TokenLogprob


@dataclass(frozen=True)
class Step:
    """The tree of one request in a round.

    drafted: the tree as a drafter sent it, or the root alone. wanted: whether a drafter was to send one. uncut: the
    tree with `forced_tokens`, those that the grammar implies. kept: the nodes of it that are verified. draft: the
    number of the drafter's tree, 0 for the root alone; draft_us: what its model took.
    """

    request: Request
    drafted: TokenTree
    wanted: bool
    forced_tokens: list[int]
    uncut: TokenTree
    kept: Array
    draft: int = 0
    draft_us: int = 0

    @classmethod
    def of(cls, request: Request, drafted: TokenTree, draft: int = 0, draft_us: int = 0) -> Step:
        """Add what the request's grammar implies, and remove what the grammar or the request rules out."""
        forced_tokens = request.forced_tokens(drafted)
        tree = drafted.grafted(forced_tokens, GRAFT_PROB)
        wanted = request.wants_draft and not request.root_only
        return cls(request, drafted, wanted, forced_tokens, tree, request.admitted(tree), draft, draft_us)

    @cached_property
    def tree(self) -> TokenTree:
        """The tree that is verified."""
        return self.uncut if len(self.kept) == len(self.uncut) else self.uncut.keep(self.kept)

    @property
    def is_speculative(self) -> bool:
        """Whether anything is verified but the root."""
        return len(self.kept) > 1

    def best(self, rows: int) -> Step:
        """Keep at most `rows` nodes: the root and the most confident, which include all of their ancestors."""
        if rows >= len(self.kept):
            return self
        order = np.argsort(-self.uncut.confidence[self.kept[1:]], kind="stable") + 1
        return replace(self, kept=self.kept[np.sort(np.append(0, order[: rows - 1]))])

    def verify(self, logits: Tensor, output: Output, index: int, first: int) -> StepResult:
        """Walk down the tree, and record in the request how the round ended. Raises if the logits are not numbers.

        logits: [nodes, vocab]. output: what the forward gave, in which this is the tree of that index, and its rows
        begin at `first`.
        """
        request = self.request
        path, tokens = verify(self.tree, logits, request.sampler, output.known(index))
        ranked = self._ranked(output.successors_of(first, len(self.tree)))
        accepted = self.kept[path].tolist() if self.is_speculative else path
        hit = request.hit
        request.accept(path, self.draft, accepted[-1], tokens, output.states_of(index, path))
        sources = (GRAMMAR if node >= len(self.drafted) else int(self.uncut.source[node]) for node in accepted[1:])
        return StepResult(
            request,
            self.draft,
            accepted,
            tokens,
            len(self.kept),
            hit,
            int(self.tree.depths.max()) if self.is_speculative else 0,
            self.draft_us,
            ranked,
            (*sources, 0),
            request.sampler.take_logprobs(),
            tuple(self.forced_tokens),
        )

    def _ranked(self, successors: Array | None) -> Array | None:
        """Return [nodes, count] int32: the target's likeliest tokens after every drafted node, -1 for nodes that were
        cut.
        """
        if successors is None:
            return None
        ranked = np.full((len(self.uncut), successors.shape[1]), -1, np.int32)
        ranked[self.kept] = successors
        return ranked


def cut(steps: Sequence[Step], costs: CostModel) -> list[Step]:
    """Cut the steps to the nodes that pay, chosen over all trees together."""
    if not any(step.is_speculative for step in steps):
        return [*steps]
    keys_each = sum(step.request.cache.length for step in steps) / len(steps)
    pay = costs.paying_nodes([step.uncut.confidence[step.kept] for step in steps], keys_each)
    return [replace(step, kept=step.kept[nodes]) for step, nodes in zip(steps, pay, strict=True)]


@dataclass(frozen=True)
class StepResult:
    """What a round came to for one request.

    draft: the tree's number. path: accepted nodes of the drafted tree; tokens: emitted. nodes: verified, or read. hit:
    the verified tree had arrived when the previous round ended. successors: [nodes drafted, k] int32. sources,
    logprobs: one per token. forced_tokens: the step's.
    """

    request: Request
    draft: int
    path: list[int]
    tokens: list[int]
    nodes: int
    hit: bool = False
    depth: int = 0
    draft_us: int = 0
    successors: Array | None = None
    sources: tuple[int, ...] = (0,)
    logprobs: tuple[TokenLogprob, ...] = ()
    forced_tokens: tuple[int, ...] = ()


DeferredDraw = Callable[[], StepResult | None]
"""Draws one request's tokens from its rows of a forward; None if it only read. Raises if its logits are not numbers."""


def deferred_draws(
    steps: Sequence[Step],
    readers: Sequence[Request],
    chunks: Sequence[Segment],
    logits: Tensor,
    hidden_states: Tensor | None,
    successors: int,
    pool: KVPool | None = None,
    states_stay: bool = False,
) -> tuple[Output, list[DeferredDraw]]:
    """Give each tree, and then each chunk, its part of a forward's output, which is returned too. On a GPU all that can
    be drawn is launched, and nothing is waited for. logits: [rows wanted, vocab]; hidden_states: [rows, layers,
    hidden], None if nobody wants them. successors: how many of the likeliest tokens the drafter wants of each node.
    pool: of keys and values, None if they are elsewhere. states_stay: whether a drafter takes hidden states from where
    they are on a GPU.
    """
    *firsts, rows = accumulate((len(step.tree) for step in steps), initial=0)
    drawn, reads = list[DrawnTree](), list[partial[StepResult | None]]()
    for step, first in zip(steps, firsts, strict=True):
        drawn.append(DrawnTree(step.tree, step.request.sampler, first, step.request.cache if pool else None))
    row = wanted = rows
    for request, chunk in zip(readers, chunks, strict=True):
        end = wanted + chunk.wanted_rows
        reads.append(partial(_read, request, chunk, logits[wanted:end], first=row, index=len(drawn)))
        if chunk.wanted_rows:
            drawn.append(DrawnTree(TokenTree.root_only(0), request.sampler, end - 1))
        row, wanted = row + len(chunk), end
    output = output_of(drawn, logits, hidden_states, pool, rows, successors, states_stay)
    trees = enumerate(zip(steps, firsts, strict=True))
    return output, [
        *(partial(step.verify, logits[at : at + len(step.tree)], output, index, at) for index, (step, at) in trees),
        *(partial(read, output=output) for read in reads),
    ]


def _read(
    request: Request, chunk: Segment, logits: Tensor, first: int, index: int, output: Output
) -> StepResult | None:
    """Record that a chunk was read; after a prompt's last one, draw the first token. logits: [rows wanted, vocab].
    output: what the forward gave, in which the chunk's rows begin at `first`, and its last one is the tree `index`.
    """
    logprobs = list[TokenLogprob]()
    if request.reads_all:
        following = request.text[chunk.past + 1 : chunk.past + 1 + len(chunk)]
        logprobs = token_logprobs(logits, following, request.sampling.prompt_logprobs or 0)
    is_last = request.read(chunk, logprobs, output.read_states(first, len(chunk)))
    if not is_last or request.has_answer:
        return None
    token = request.sampler.draw(request.sampler.choices(logits[-1:], output.known(index))[0])
    request.begin_answer(token)
    return StepResult(request, 0, [0], [token], len(chunk), logprobs=request.sampler.take_logprobs())

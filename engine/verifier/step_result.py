"""The outcome of a round for each request: its tree is walked down, or a chunk of its prompt was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from torch import Tensor

from engine.core.batch import Segment
from engine.core.hidden_states import States
from engine.core.methods import GRAMMAR
from engine.model.runner import bfloat16_bits
from engine.sampling.argmax import argmax
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import verify
from engine.verifier.request import Request
from engine.verifier.step_input import StepInput
from engine.wire.messages import Array, TokenLogprob

_SMALL = 8  # nodes of a tree of which the argmax is found without knowing whether it is needed


@dataclass(frozen=True)
class StepResult:
    """draft: the tree's number. path: accepted nodes of the drafted tree; tokens: emitted. nodes: verified, or read.
    hit: the verified tree had arrived when the previous round ended.

    successors: [nodes proposed, k] int32. sources, logprobs: one per token. forced_tokens: the round's.
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


@dataclass(frozen=True)
class TreeRows:
    """A tree's rows of a forward's output. logits: [nodes, vocab]; best: [nodes] their argmax, if known; states:
    [nodes, layers, hidden], None if nobody wants them. successors: how many of the likeliest tokens the drafter wants
    of each node.
    """

    step: StepInput
    logits: Tensor
    best: Sequence[int] | None
    states: States | None
    successors: int

    @property
    def request(self) -> Request:
        return self.step.request

    def verify(self) -> StepResult:
        """Walk down the tree. Raises if the logits are not numbers."""
        path, tokens = verify(self.step.tree, self.logits, self.request.sampler, self.best)
        ranked = _successors(self.step, self.logits, self.successors) if self.successors else None
        return _conclude(self.step, path, tokens, None if self.states is None else self.states[path], ranked)


def tree_rows(
    steps: Sequence[StepInput], logits: Tensor, hidden_states: Tensor | None, successors: int
) -> list[TreeRows]:
    """Each tree's part of a forward's output. logits: [rows, vocab], hidden_states: [rows, layers, hidden]; the trees'
    rows come first.
    """
    ends = list(accumulate(len(step.kept) for step in steps))
    count = ends[-1] if ends else 0
    # one call for all nodes, since a call takes longer than a row's argmax; but of a large tree few nodes are drawn
    # from, and on a CPU the logits of the others need not be read
    at_once = logits.device.type != "cpu" or count <= _SMALL * len(steps)
    greedy = any(step.request.sampling.greedy for step in steps)
    best = argmax(logits[:count]) if at_once and greedy else None
    states = None if hidden_states is None else bfloat16_bits(hidden_states[:count])
    return [
        TreeRows(
            step,
            logits[end - len(step.kept) : end],
            None if best is None else best[end - len(step.kept) : end],
            None if states is None else states[end - len(step.kept) : end],
            successors,
        )
        for step, end in zip(steps, ends, strict=True)
    ]


def _conclude(
    step: StepInput, path: list[int], tokens: list[int], states: States | None, successors: Array | None
) -> StepResult:
    """Record in the request how the round ended. path: accepted nodes of the verified tree; states: theirs."""
    request, own = step.request, len(step.proposal.tree)
    hit, accepted = request.hit, step.kept[path].tolist() if step.is_speculative else path
    request.accept(path, step.proposal.number, accepted[-1], tokens, states)
    sources = (GRAMMAR if node >= own else int(step.uncut.source[node]) for node in accepted[1:])
    return StepResult(
        request,
        step.proposal.number,
        accepted,
        tokens,
        len(step.kept),
        hit,
        int(step.tree.depths.max()) if step.is_speculative else 0,
        step.proposal.draft_us,
        successors,
        (*sources, 0),
        request.sampler.take_logprobs(),
        tuple(step.forced_tokens),
    )


def _successors(step: StepInput, logits: Tensor, count: int) -> Array:
    """[nodes, count] int32: the target's likeliest tokens after every drafted node, -1 for nodes that were cut."""
    ranked = np.full((len(step.uncut), count), -1, np.int32)
    ranked[step.kept] = logits.topk(count).indices.cpu().numpy()
    return ranked


@dataclass(frozen=True)
class ChunkRows:
    """A prompt chunk's rows of a forward's output. logits: [rows wanted, vocab]; states: [tokens, layers, hidden] or
    None.
    """

    request: Request
    chunk: Segment
    logits: Tensor
    states: Tensor | None

    def verify(self) -> StepResult | None:
        """After a prompt's last chunk, draw the first token. Raises if the logits are not numbers."""
        request, chunk, logprobs = self.request, self.chunk, list[TokenLogprob]()
        if request.reads_all:
            following = request.text[chunk.past + 1 : chunk.past + 1 + len(chunk)]
            logprobs = token_logprobs(self.logits, following, request.sampling.prompt_logprobs or 0)
        is_last = request.read(chunk, logprobs, None if self.states is None else bfloat16_bits(self.states))
        if not is_last or request.has_answer:
            return None
        token = request.sampler.draw(request.sampler.choices(self.logits[-1:])[0])
        request.begin_answer(token)
        return StepResult(request, 0, [0], [token], len(chunk), logprobs=request.sampler.take_logprobs())


def chunk_rows(
    readers: Sequence[Request], chunks: Sequence[Segment], logits: Tensor, hidden_states: Tensor | None
) -> list[ChunkRows]:
    """Each chunk's part of a forward's output. logits: [rows wanted, vocab], hidden_states: [rows, layers, hidden]; the
    chunks' rows come last.
    """
    row = (0 if hidden_states is None else len(hidden_states)) - sum(map(len, chunks))
    first = len(logits) - sum(chunk.wanted_rows for chunk in chunks)
    found = []
    for request, chunk in zip(readers, chunks, strict=True):
        states = None if hidden_states is None else hidden_states[row : row + len(chunk)]
        found.append(ChunkRows(request, chunk, logits[first : first + chunk.wanted_rows], states))
        row, first = row + len(chunk), first + chunk.wanted_rows
    return found

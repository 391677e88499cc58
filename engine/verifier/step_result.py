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
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import verify
from engine.verifier.known_tokens import Known, RowStates, known_tokens, row_states
from engine.verifier.request import Request
from engine.verifier.step_input import StepInput
from engine.wire.messages import Array, TokenLogprob


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
    """A tree's rows of a forward's output. logits: [nodes, vocab]; known: what is drawn at each node, if known; states:
    of all trees' rows, None if nobody wants them; first: its first row there. successors: how many of the likeliest
    tokens the drafter wants of each node.
    """

    step: StepInput
    logits: Tensor
    known: Known
    states: RowStates | None
    first: int
    successors: int

    @property
    def request(self) -> Request:
        return self.step.request

    def verify(self) -> StepResult:
        """Walk down the tree. Raises if the logits are not numbers."""
        path, tokens = verify(self.step.tree, self.logits, self.request.sampler, self.known)
        ranked = _successors(self.step, self.logits, self.successors) if self.successors else None
        states = None if self.states is None else self.states.of([self.first + node for node in path])
        return _conclude(self.step, path, tokens, states, ranked)


def tree_rows(
    steps: Sequence[StepInput], logits: Tensor, hidden_states: Tensor | None, successors: int
) -> list[TreeRows]:
    """Each tree's part of a forward's output. logits: [rows, vocab], hidden_states: [rows, layers, hidden]; the trees'
    rows come first.
    """
    trees = [step.tree for step in steps]
    begins = [0, *accumulate(map(len, trees))]
    known = known_tokens(trees, [step.request.sampler for step in steps], logits[: begins[-1]])
    states = row_states(None if hidden_states is None else hidden_states[: begins[-1]], trees, known)
    return [
        TreeRows(step, logits[begin : begin + len(step.tree)], tokens, states, begin, successors)
        for step, begin, tokens in zip(steps, begins, known, strict=False)
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

"""The outcome of a round for each request: its tree is walked down, prompt chunks are committed.

A request whose draw fails, because its logits are not numbers, is handed to `fail`; the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import Segment
from engine.core.hidden_states import States
from engine.core.methods import GRAMMAR
from engine.model.target import bfloat16_bits
from engine.sampling.argmax import argmax
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import verify
from engine.verifier.request import Request
from engine.verifier.step_input import StepInput
from engine.wire.messages import Array, TokenLogprob

_SMALL = 8  # nodes of a tree of which the argmax is found without knowing whether it is needed
Fail = Callable[[Request, Exception], None]


@dataclass(frozen=True)
class StepResult:
    """draft: the tree's number. path: accepted nodes of the drafted tree; tokens: emitted. nodes: verified, or read.
    hit: the verified tree had arrived when the previous round ended.

    successors: [nodes drafted, k] int32. sources, logprobs: one per token. grafts: the round's.
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
    grafts: tuple[int, ...] = ()


def conclude_trees(
    rounds: Sequence[StepInput], logits: Tensor, features: Tensor | None, successors: int, fail: Fail
) -> Iterator[StepResult]:
    """Walk down each tree in turn. successors: how many the drafter wants per node.

    logits: [rows, vocab], features: [rows, layers, hidden], the trees' rows first.
    """
    count, first = sum(len(round_.kept) for round_ in rounds), 0
    # one call for all nodes, since a call takes longer than a row's argmax; but of a large tree few nodes are drawn
    # from, and on a CPU the logits of the others need not be read
    at_once = logits.device.type != "cpu" or count <= _SMALL * len(rounds)
    greedy = any(round_.request.sampling.greedy for round_ in rounds)
    best = argmax(logits[:count]) if at_once and greedy else None
    states = None if features is None else bfloat16_bits(features[:count])
    for round_ in rounds:
        rows, first = slice(first, first + len(round_.kept)), first + len(round_.kept)
        known = None if best is None else best[rows]
        try:
            path, tokens = verify(round_.tree, logits[rows], round_.request.sampler, known)
        except torch.AcceleratorError:
            raise  # the device's state is lost, as in `Verifier._step`
        except Exception as error:  # logits that are not numbers
            fail(round_.request, error)
            continue
        ranked = _successors(round_, logits[rows], successors) if successors else None
        walked = None if states is None else states[rows][path]
        yield _conclude(round_, path, tokens, walked, ranked)


def _conclude(
    round_: StepInput, path: list[int], tokens: list[int], states: States | None, successors: Array | None
) -> StepResult:
    """Record in the request how the round ended. path: accepted nodes of the verified tree; states: theirs."""
    request, own = round_.request, len(round_.proposal.tree)
    if round_.is_speculative and not round_.grafts:
        request.trust.learn(float(round_.worth[round_.kept].sum()), len(tokens))
    request.round += 1
    request.kept_path = path
    hit, accepted = request.hit, round_.kept[path].tolist() if round_.is_speculative else path
    request.go_on(round_.proposal.number, accepted[-1], tokens)
    if states is not None:
        request.features.add(request.cache.length, states, unsent=request.drafted)
    sources = (GRAMMAR if node >= own else int(round_.drafted.source[node]) for node in accepted[1:])
    return StepResult(
        request,
        round_.proposal.number,
        accepted,
        tokens,
        len(round_.kept),
        hit,
        int(round_.tree.depths.max()) if round_.is_speculative else 0,
        round_.proposal.draft_us,
        successors,
        (*sources, 0),
        request.sampler.take_logprobs(),
        tuple(round_.grafts),
    )


def _successors(round_: StepInput, logits: Tensor, count: int) -> Array:
    """[nodes, count] int32: the target's likeliest tokens after every drafted node, -1 for nodes that were cut."""
    ranked = np.full((len(round_.drafted), count), -1, np.int32)
    ranked[round_.kept] = logits.topk(count).indices.cpu().numpy()
    return ranked


def conclude_chunks(
    readers: Sequence[Request], chunks: Sequence[Segment], logits: Tensor, features: Tensor | None, fail: Fail
) -> list[StepResult]:
    """Commit the chunks; after the last one of a prompt, draw the first token.

    logits: [rows wanted, vocab], features: [rows, layers, hidden], the chunks' rows last.
    """
    concluded = []
    row = (0 if features is None else len(features)) - sum(map(len, chunks))
    first = len(logits) - sum(chunk.wanted_rows for chunk in chunks)
    for request, chunk in zip(readers, chunks, strict=True):
        rows, first = logits[first : first + chunk.wanted_rows], first + chunk.wanted_rows
        if request.reads_all:
            behind = request.text[chunk.past + 1 : chunk.past + 1 + len(chunk)]
            request.prompt_logprobs += token_logprobs(rows, behind, request.sampling.prompt_logprobs or 0)
        request.cache.commit(range(len(chunk)))
        if features is not None:
            unsent = request.drafted and not request.has_answer
            request.features.add(chunk.past, bfloat16_bits(features[row : row + len(chunk)]), unsent)
        row += len(chunk)
        if request.reading or request.has_answer:
            request.asked_ns = time.perf_counter_ns()
            continue
        try:
            token = request.sampler.draw(request.sampler.choices(rows[-1:])[0])
        except torch.AcceleratorError:
            raise
        except Exception as error:
            fail(request, error)
        else:
            request.has_answer = True
            request.go_on(0, 0, [token])
            logprobs = request.sampler.take_logprobs()
            concluded.append(StepResult(request, 0, [0], [token], len(chunk), logprobs=logprobs))
    return concluded

"""The Markov link of one-pass heads: what the token before a row adds to the row's logits, as in DSpark.

A row's logits are second @ (gate * first[token]), gate = sigmoid(of_state @ state + of_token[token]) or 1. Over the
whole vocabulary this is computed behind a tree's root alone. Further down only the row's candidates are linked, for the
nodes that a tree grows from: on the CPU whatever computes the head, since these are few numbers from large tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from drafters.checkpoint import Checkpoint
from drafters.layers import Linear, small_dtype
from drafters.top import enter
from engine.model.exponential import exp
from engine.model.simd import FLOAT32, LANES, add, divide, fma, load, multiply, numbers_at, splat, store, total

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Gate:
    """of_state: [hidden, rank], on the head's device; of_token: [vocab, rank], the bias included, on the CPU."""

    of_state: Tensor
    of_token: Tensor


class Link:
    """first: [vocab, rank], second: [draft_vocab, rank], both on the CPU, the rank filled up to whole vectors.

    product: multiplies by all of `second`, on the head's device.
    """

    def __init__(self, checkpoint: Checkpoint, vocab: int, outputs: int, hidden: int, device: torch.device):
        dtype = small_dtype(device)
        rank = checkpoint.number("markov_rank")
        kind = checkpoint.config.get("markov_head_type", "vanilla")
        if kind not in ("vanilla", "gated"):
            raise checkpoint.error(f"config.json: markov_head_type={kind!r} is not supported, vanilla and gated are")
        first = checkpoint.take("markov_head.markov_w1.weight", vocab, rank).to(dtype)
        self.first = _whole(first)
        self.second = _whole(checkpoint.take("markov_head.markov_w2.weight", outputs, rank).to(dtype))
        self.product = Linear(self.second.to(device))
        self.gate: Gate | None = None
        if kind == "gated":
            weight = checkpoint.take("markov_head.gate_proj.weight", rank, hidden + rank).to(dtype)
            bias = checkpoint.take("markov_head.gate_proj.bias", rank).to(dtype)
            of_state = _whole(weight[:, :hidden].T).to(device)
            self.gate = Gate(of_state, _whole(first @ weight[:, hidden:].T + bias))

    def __call__(self, states: Tensor, tokens: Tensor) -> Tensor:
        """states: [rows, hidden]; tokens: [rows] the target's ids -> [rows, rank], the input of `second`."""
        tokens = tokens.cpu()
        linked = self.first[tokens].to(states.device)
        if self.gate is None:
            return linked
        said = states.to(linked.dtype) @ self.gate.of_state + self.gate.of_token[tokens].to(states.device)
        return torch.sigmoid(said) * linked

    def gates(self, states: Tensor) -> Floats:
        """[rows, rank]: the states' part in the gate."""
        if self.gate is None:
            return np.zeros((len(states), self.first.shape[1]), np.float32)
        return np.ascontiguousarray((states.to(self.gate.of_state.dtype) @ self.gate.of_state).float().cpu().numpy())

    def add(self, scores: Floats, candidates: Integers, gates: Floats, tokens: Integers, gain: float) -> None:
        """Add the link, times `gain`, to the scores of each row's candidates.

        scores, candidates: [n, k], the draft vocabulary's ids; gates: [n, rank]; tokens: [n] before each row.
        """
        of_token = 0 if self.gate is None else self.gate.of_token.data_ptr()
        first, second, width = self.first.data_ptr(), self.second.data_ptr(), self.first.itemsize
        _add(scores, candidates, gates, tokens, np.float32(gain), first, of_token, second, width)


def _whole(weight: Tensor) -> Tensor:
    return F.pad(weight, (0, -weight.shape[1] % LANES)).contiguous()


@njit(cache=True, nogil=True)
def _add(
    scores: Any, candidates: Any, gates: Any, tokens: Any, gain: Any, first: int, of_token: int, second: int, width: int
) -> None:
    rank, one = gates.shape[1], splat(np.float32(1))
    linked = np.empty(rank, np.float32)
    place = linked.ctypes.data
    for row in range(len(scores)):
        at, gate = tokens[row] * rank, gates.ctypes.data + 4 * row * rank
        for lane in range(0, rank, LANES):
            x = numbers_at(first + (at + lane) * width, width)
            if of_token:
                said = add(load(gate + 4 * lane, FLOAT32), numbers_at(of_token + (at + lane) * width, width))
                x = divide(x, add(one, exp(multiply(splat(np.float32(-1)), said))))
            store(x, place + 4 * lane, FLOAT32)
        for column in range(scores.shape[1]):
            of_candidate, sums = candidates[row, column] * rank, splat(np.float32(0))
            for lane in range(0, rank, LANES):
                weights = numbers_at(second + (of_candidate + lane) * width, width)
                sums = fma(load(place + 4 * lane, FLOAT32), weights, sums)
            scores[row, column] += gain * total(sums)


@njit(cache=True, nogil=True)
def likeliest(scores: Any, rest: Any, sure: Any, places: Any, chances: Any) -> None:
    """The best k of each row's scores, and their chances.

    scores: [n, candidates]; rest: [n], the sum of exp(score) of what is no candidate; sure: [n], by which the chances
    are multiplied. Written: places, [n, k] int64, best first, and chances, [n, k] float32.
    """
    k = places.shape[1]
    for row in range(len(scores)):
        best, count = np.empty(k, np.float32), 0
        for column in range(scores.shape[1]):
            count = enter(scores[row, column], column, best, places[row], count)
        sums = rest[row] * math.exp(-best[0])
        for column in range(scores.shape[1]):
            sums += math.exp(scores[row, column] - best[0])
        for column in range(k):
            chances[row, column] = sure[row] * math.exp(best[column] - best[0]) / sums

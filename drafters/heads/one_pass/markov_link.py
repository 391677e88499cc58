"""The Markov link of one-pass heads: what the token before a row adds to the row's logits, as in DSpark.

It adds second @ (gate * first[token]), where gate = sigmoid(of_state @ state + of_token[token]), or 1 without a gate;
in DFlash 2's selector it is of_state @ state.
Only a row's candidates are linked, for the nodes that a tree grows from: on the CPU whatever computes the head, since
these are few numbers from large tables. What a link adds to all tokens alike changes no probability, so it is
subtracted: candidates then compare with tokens that are not linked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.checkpoint import Checkpoint
from drafters.heads.layers import small_dtype
from drafters.heads.top import Floats, Integers
from engine.kernels.exponential import exp
from engine.kernels.jit_cache import cached_njit
from engine.kernels.simd import FLOAT32, LANES, add, divide, fma, load, multiply, numbers_at, splat, store, total


@dataclass(frozen=True)
class Gate:
    """The gate of a link. of_state: [hidden, rank], on the head's device; of_token: [vocab, rank], the bias included,
    on the CPU; empty where the gate is the state's part itself.
    """

    of_state: Tensor
    of_token: Tensor


class Tables(NamedTuple):
    """Addresses of a link's tables (of_token: 0 without), bytes of their numbers, and numbers of a token. plain: 1 if
    the gate is the state's part itself.
    """

    first: int
    of_token: int
    second: int
    width: int
    rank: int
    plain: int = 0


NO_LINK = Tables(0, 0, 0, 0, 0)


class Link:
    """The link's two tables, on the CPU. `first` is [vocab, rank]. `second` is [draft_vocab, rank], minus its mean. The
    rank is padded to whole vectors.
    """

    def __init__(self, first: Tensor, second: Tensor, dtype: torch.dtype, gate: Gate | None = None):
        """Lay the tables out."""
        second = second.float()
        self.first = _whole(first.to(dtype)).cpu()
        self.second = _whole((second - second.mean(0)).to(dtype)).cpu()
        self.gate = gate

    @cached_property
    def tables(self) -> Tables:
        """The addresses at which `add_link` finds the link."""
        of_token = torch.empty(0) if self.gate is None else self.gate.of_token
        plain = self.gate is not None and not len(of_token)
        addresses = self.first.data_ptr(), of_token.data_ptr() if len(of_token) else 0, self.second.data_ptr()
        return Tables(*addresses, self.first.itemsize, self.first.shape[1], int(plain))

    def add(self, scores: Floats, candidates: Integers, gates: Floats, token: int) -> None:
        """Add the link to the scores of one row's candidates: see `add_link`."""
        add_link(self.tables, scores, candidates, gates.ctypes.data, token, np.float32(1), np.empty_like(gates))


def markov_link(checkpoint: Checkpoint, vocab: int, outputs: int, hidden: int, device: torch.device) -> Link:
    """Take DSpark's Markov head. outputs: tokens of the draft vocabulary."""
    dtype, rank = small_dtype(device), checkpoint.number("markov_rank")
    kind = checkpoint.config.get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated"):
        raise checkpoint.error(f"config.json: markov_head_type={kind!r} is not supported, vanilla and gated are")
    first = checkpoint.take("markov_head.markov_w1.weight", vocab, rank).to(device, dtype)
    second = checkpoint.take("markov_head.markov_w2.weight", outputs, rank)
    if kind == "vanilla":
        return Link(first, second, dtype)
    weight = checkpoint.take("markov_head.gate_proj.weight", rank, hidden + rank).to(device, dtype)
    bias = checkpoint.take("markov_head.gate_proj.bias", rank).to(device, dtype)
    gate = Gate(_whole(weight[:, :hidden].T), _whole(first @ weight[:, hidden:].T + bias).cpu())
    return Link(first, second, dtype, gate)


def selector(
    checkpoint: Checkpoint, rank: int, target_ids: Tensor, vocab: int, hidden: int, device: torch.device
) -> Link:
    """Take DFlash 2's selector, which adds <A[token before] * H state, B[token]>. target_ids: of the drafted tokens."""
    dtype = small_dtype(device)
    before, after = (
        checkpoint.take(f"candidate_selector.{name}_codebook", vocab, rank) for name in ("predecessor", "successor")
    )
    projection = checkpoint.take("candidate_selector.hidden_projection.weight", rank, hidden).to(device, dtype)
    return Link(before, after[target_ids.cpu()], dtype, Gate(_whole(projection.T), torch.empty(0)))


def _whole(weight: Tensor) -> Tensor:
    return F.pad(weight, (0, -weight.shape[1] % LANES)).contiguous()


@cached_njit
def add_link(tables: Any, scores: Any, candidates: Any, gates: int, token: int, gain: Any, linked: Any) -> None:
    """Add the link, times `gain`, to the scores of a row's candidates.

    scores, candidates: [k], the draft vocabulary's ids; gates: address of the state's part in the gate, [rank]; token:
    before the row; linked: [rank], scratch.
    """
    one, place = splat(np.float32(1)), linked.ctypes.data
    width, rank = tables.width, tables.rank
    for lane in range(0, rank, LANES):
        x = numbers_at(tables.first + (token * rank + lane) * width, width)
        if tables.plain:
            x = multiply(x, load(gates + 4 * lane, FLOAT32))
        elif tables.of_token:
            said = add(
                load(gates + 4 * lane, FLOAT32), numbers_at(tables.of_token + (token * rank + lane) * width, width)
            )
            x = divide(x, add(one, exp(multiply(splat(np.float32(-1)), said))))
        store(x, place + 4 * lane, FLOAT32)
    for column in range(len(scores)):
        of_candidate, sums = candidates[column] * rank, splat(np.float32(0))
        for lane in range(0, rank, LANES):
            weights = numbers_at(tables.second + (of_candidate + lane) * width, width)
            sums = fma(load(place + 4 * lane, FLOAT32), weights, sums)
        scores[column] += gain * total(sums)

"""A layer's experts: each row is multiplied by the few that its router chooses, the rows of an expert together.

    x --> [product router] --> router --> [route] --> chosen, shares --> [pack] --> places, records of the products
    x --> [gather] --> packed --> [gate_up of each] --> inner --> [down of each] --> packed --> [combine] --> delta

Where gate_up does not apply the activation itself, it makes `both`, of which [gate] makes `inner`.

A shared expert is an MLP of every row, whose result [combine] adds, times the sigmoid of the router's last output where
that is its gate.

Which experts a row gets and how their results are added depends on the row alone, and a product's rows do not depend on
each other: a row has the same bits whatever the others choose.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from engine.kernels.exponential import exp
from engine.kernels.gemm.matmul import row_words
from engine.kernels.gemm.matmul_kernels import MATMUL
from engine.kernels.layer.weights import ExpertMlp
from engine.kernels.records import record_of
from engine.kernels.simd import (
    LANES,
    float_at,
    fma,
    int_at,
    largest,
    long_at,
    number_at,
    numbers_at,
    put_float,
    put_int,
    put_long,
    put_numbers,
    splat,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import address_of, barrier, kernel, num_threads, run_step, thread_id

EXPERTS = record_of(
    "rows",
    "logits",  # [rows, logit_count] of the router: of each expert, then of the gate of the shared one
    "logit_count",
    "scales",  # [experts] float32, which multiply shares, or 0
    "bias",  # [experts] float32, added to what experts are chosen by, or 0
    "groups",  # of neighbouring experts, 63 at most
    "top_groups",  # how many of them experts are chosen of
    "counted",  # 1 or 2: how many of a group's best experts it is chosen by
    "sigmoid",  # 1: an expert's share is the sigmoid of its logit; 0: the softmax
    "shared_out",  # [rows, hidden]: what the shared expert makes of x, or 0
    "shared_gate",  # 1: it is multiplied by the sigmoid of the router's last output
    "x",  # [rows, hidden]
    "out",  # [rows, hidden]
    "chosen",  # [rows, top_k] int32: the likeliest experts, the best first
    "shares",  # [rows, top_k] float32: what each counts
    "places",  # [rows, top_k] int32: which packed row is each
    "packed",  # [rows * top_k, hidden]: x by expert, later what comes of it
    "made",  # [rows * top_k, made_size]: what gate_up makes, `inner` if it applies the activation
    "inner",  # [rows * top_k, inner_size]
    "records",  # [2, experts] MATMUL: gate_up and down of each
    "steps",  # [experts, 2]: addresses of a product's kernel and of its record
    "tiles",  # `tiles` of a product of 0 rows
    "experts",
    "top_k",
    "hidden",
    "made_size",
    "inner_size",
    "width",
    "normalised",  # 1: the shares of the chosen sum to 1
    "shared",  # 1: the products have scratch that all threads use together
    floats=(
        "scale",  # of all shares
        "least",  # added to a sum of sigmoids by which shares are divided
    ),
)
_ROWS, _TILES, _X, _OUT = (MATMUL.fields[name][1] for name in ("rows", "tiles", "x", "out"))  # type: ignore[index]
_RECORD = MATMUL.itemsize


@kernel(EXPERTS)
def route_kernel(address: Any) -> None:
    """Choose each row's experts, of equals the first, and their shares: the softmax of their logits, or the sigmoid."""
    work = carray(address, 1)[0]
    for row in range(thread_id(), work.rows, num_threads()):
        logits, chosen = work.logits + row * work.logit_count * work.width, row * work.top_k * 4
        top, total = _softmax_of(work, logits)
        last, last_expert, allowed = np.float32(np.inf), -1, _allowed(work, logits, top, total)
        sums = np.float32(0)
        for rank in range(work.top_k):
            best, best_expert = np.float32(-np.inf), -1
            for expert in range(work.experts):
                if work.groups > 1 and allowed >> (expert * work.groups // work.experts) & 1 == 0:
                    continue
                x = _score(work, logits, expert, top, total)
                if (x < last or (x == last and expert > last_expert)) and (best_expert < 0 or x > best):
                    best, best_expert = x, expert
            best_expert = max(best_expert, 0)  # where logits are NaN
            if rank == 0 and work.bias == 0:
                top = best
            share = _share(work, logits, best_expert, top)
            sums += share
            put_int(work.chosen + chosen + 4 * rank, np.int32(best_expert))
            put_float(work.shares + chosen + 4 * rank, share)
            last, last_expert = best, best_expert
        if work.sigmoid != 0:
            sums = sums + work.least if work.normalised != 0 else np.float32(1)
        elif work.normalised == 0:
            sums = np.float32(0)
            for expert in range(work.experts):
                sums += _share(work, logits, expert, top)
        for rank in range(work.top_k):
            place = work.shares + chosen + 4 * rank
            scale = work.scale
            if work.scales != 0:
                scale *= float_at(work.scales + 4 * int_at(work.chosen + chosen + 4 * rank))
            put_float(place, float_at(place) / sums * scale)


@subroutine
def _softmax_of(work: Any, logits: int) -> Any:
    """Return the largest logit and the sum of the softmax, where experts are chosen by it and a bias; else 0 and 1."""
    top, total = np.float32(0), np.float32(1)
    if work.sigmoid == 0 and work.bias != 0:
        top, total = np.float32(-np.inf), np.float32(0)
        for expert in range(work.experts):
            top = max(top, number_at(logits + expert * work.width, work.width))
        for expert in range(work.experts):
            total += _share(work, logits, expert, top)
    return top, total


@subroutine
def _allowed(work: Any, logits: int, top: Any, total: Any) -> Any:
    """Return a bit for each group of which experts are chosen; none where all are of one."""
    allowed, each = np.int64(0), work.experts // work.groups
    for _ in range(work.top_groups if work.groups > 1 else 0):
        best, best_group = np.float32(-np.inf), 0
        for group in range(work.groups):
            if allowed >> group & 1:
                continue
            first = second = np.float32(-np.inf)
            for expert in range(group * each, (group + 1) * each):
                x = _score(work, logits, expert, top, total)
                first, second = max(first, x), max(second, min(first, x))
            x = first + second if work.counted == 2 else first
            if x > best:
                best, best_group = x, group
        allowed |= np.int64(1) << best_group
    return allowed


@subroutine
def _score(work: Any, logits: int, expert: int, top: Any, total: Any) -> Any:
    """Return what the experts are chosen by. top, total: of the softmax, which logits without a bias rank alike."""
    x = number_at(logits + expert * work.width, work.width)
    if work.sigmoid != 0:
        x = _sigmoid(x)
    elif work.bias != 0:
        x = _share(work, logits, expert, top) / total
    return x if work.bias == 0 else x + float_at(work.bias + 4 * expert)


@subroutine
def _share(work: Any, logits: int, expert: int, top: Any) -> Any:
    """Return what an expert counts, before shares are normalised. top: the largest logit, where there is a softmax."""
    x = number_at(logits + expert * work.width, work.width)
    return _sigmoid(x) if work.sigmoid != 0 else largest(exp(splat(x - top)))


@subroutine
def _sigmoid(x: Any) -> Any:
    return np.float32(1) / (np.float32(1) + largest(exp(splat(-x))))


@kernel(EXPERTS)
def pack_kernel(address: Any) -> None:
    """Give every chosen row its place among the packed ones, and every expert's products their rows."""
    work = carray(address, 1)[0]
    if thread_id() != 0:
        return
    units, down = work.rows * work.top_k, work.experts * _RECORD
    for expert in range(work.experts):
        put_long(work.records + expert * _RECORD + _ROWS, 0)
    for unit in range(units):
        count = work.records + int_at(work.chosen + 4 * unit) * _RECORD + _ROWS
        put_long(count, long_at(count) + 1)
    first = 0
    for expert in range(work.experts):
        record = work.records + expert * _RECORD
        packed = work.packed + first * work.hidden * work.width
        inner = work.inner + first * work.inner_size * work.width
        put_long(record + _X, packed)
        put_long(record + _OUT, work.made + first * work.made_size * work.width)
        put_long(record + down + _X, inner)
        put_long(record + down + _OUT, packed)
        put_long(record + _TILES, first)  # for now: the place of its next row
        first += long_at(record + _ROWS)
    for unit in range(units):
        place = work.records + int_at(work.chosen + 4 * unit) * _RECORD + _TILES
        put_int(work.places + 4 * unit, np.int32(long_at(place)))
        put_long(place, long_at(place) + 1)
    for expert in range(work.experts):
        record = work.records + expert * _RECORD
        rows = long_at(record + _ROWS)
        put_long(record + _TILES, work.tiles + 64 * min(rows, LANES))
        put_long(record + down + _ROWS, rows)
        put_long(record + down + _TILES, work.tiles + 64 * min(rows, LANES))


@kernel(EXPERTS)
def gather_kernel(address: Any) -> None:
    """Copy every row to its places."""
    work = carray(address, 1)[0]
    for unit in range(thread_id(), work.rows * work.top_k, num_threads()):
        source = work.x + unit // work.top_k * work.hidden * work.width
        place = work.packed + int_at(work.places + 4 * unit) * work.hidden * work.width
        for at in range(0, work.hidden * work.width, LANES * work.width):
            put_numbers(numbers_at(source + at, work.width), place + at, work.width)


@kernel(EXPERTS)
def experts_kernel(address: Any) -> None:
    """Compute one product of each expert that has rows. The threads share each. What they have in common, of rows in
    another form, is there once: no thread begins the next expert while another needs this one's.
    """
    work = carray(address, 1)[0]
    for expert in range(work.experts):
        if long_at(work.records + expert * _RECORD + _ROWS) != 0:
            run_step(work.steps + 16 * expert)
            if work.shared != 0:
                barrier()


@kernel(EXPERTS)
def combine_kernel(address: Any) -> None:
    """Compute out = the sum of a row's results, each times its share, the best expert first and the shared one last."""
    work = carray(address, 1)[0]
    for row in range(thread_id(), work.rows, num_threads()):
        gate = np.float32(1)
        if work.shared_gate != 0:
            gate = _sigmoid(number_at(work.logits + (row * work.logit_count + work.experts) * work.width, work.width))
        for at in range(0, work.hidden * work.width, LANES * work.width):
            sums = splat(np.float32(0))
            for rank in range(work.top_k):
                unit = 4 * (row * work.top_k + rank)
                source = work.packed + int_at(work.places + unit) * work.hidden * work.width
                sums = fma(numbers_at(source + at, work.width), splat(float_at(work.shares + unit)), sums)
            if work.shared_out != 0:
                source = work.shared_out + row * work.hidden * work.width
                sums = fma(numbers_at(source + at, work.width), splat(gate), sums)
            put_numbers(sums, work.out + row * work.hidden * work.width + at, work.width)


class ExpertRecords:
    """The records of one layer's experts. up, down: addresses of EXPERTS records that differ in the product that
    `experts_kernel` computes; `of_batch` sets the rows of both.
    """

    def __init__(
        self,
        mlp: ExpertMlp,
        x: Tensor,
        logits: Tensor,
        out: Tensor,
        packed_rows: Tensor,
        made: Tensor,
        packed_inner: Tensor,
        shared_out: Tensor | None,
    ):
        """packed_rows: [units, hidden], packed_inner: [units, inner], made: that or [units, 2 * inner], as the products
        of gate and up make it; of `top_k` units a row, shared by all layers.
        shared_out: [rows, hidden], if there is a shared expert.
        """
        experts, (units, hidden) = len(mlp.gate_up), packed_rows.shape
        packed, inner = packed_rows.data_ptr(), packed_inner.data_ptr()
        self._vectors = mlp.bias, mlp.scales
        self._kept = [torch.zeros(units, dtype=kind) for kind in (torch.int32, torch.int32, torch.float32)]
        chosen, places, shares = (part.data_ptr() for part in self._kept)
        work = [product.record(units // mlp.top_k, packed, inner) for product in [*mlp.gate_up, *mlp.down]]
        self.products = np.concatenate(work)  # MATMUL
        kernels = [product.kernel.address for product in [*mlp.gate_up, *mlp.down]]
        records = [address_of(self.products, i) for i in range(len(work))]
        self._steps = np.array([*zip(kernels, records, strict=True)], np.int64)
        self._all = np.zeros(2, EXPERTS)
        fields = {"logits": logits.data_ptr(), "x": x.data_ptr(), "out": out.data_ptr(), "chosen": chosen}
        fields |= {"shares": shares, "places": places, "packed": packed, "inner": inner, "hidden": hidden}
        fields |= {"records": records[0], "tiles": row_words(0)[1], "experts": experts, "top_k": mlp.top_k}
        fields |= {"made": made.data_ptr(), "made_size": made.shape[1]}
        fields |= {"inner_size": mlp.inner, "width": x.itemsize, "normalised": mlp.normalised}
        common = self.products["shared_bytes"] + self.products["gate_bytes"]
        fields |= {"shared": common.any(), "logit_count": logits.shape[1]}
        fields |= {"groups": mlp.groups, "top_groups": mlp.top_groups, "counted": mlp.counted}
        fields |= {"sigmoid": mlp.sigmoid, "bias": 0 if mlp.bias is None else mlp.bias.data_ptr(), "scale": mlp.scale}
        fields |= {"least": mlp.least, "scales": 0 if mlp.scales is None else mlp.scales.data_ptr()}
        fields |= {"shared_out": 0 if shared_out is None else shared_out.data_ptr()}
        fields |= {"shared_gate": shared_out is not None and mlp.shared_gate}
        for name, value in fields.items():
            self._all[name] = value
        self._all["steps"] = [int(self._steps.ctypes.data) + 16 * experts * part for part in range(2)]
        self.up, self.down = address_of(self._all), address_of(self._all, 1)
        self.of_batch = self._all["rows"]

"""Compares the Triton kernels of gated delta nets with float64, and a row's bits alone and in a tree; times them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.state_shape import StateShape
from engine.kernels.state.delta import delta_sizes
from engine.kernels.state.walk import StateRows
from engine.model.cuda.delta_kernels import DeltaNet, LayerStates, run_delta
from engine.model.cuda.device_walk import walk_tensor

from .findings import Record, tried
from .times import replay_us

_SHAPE = (16, 32, 128, 128)  # heads of keys and of values, and their sizes: Qwen3.5 9B
_TAPS, _ROWS = 4, 64
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # difference, as a share of the norm of the result


def run(device: str) -> Iterator[Record]:
    small = device == "cpu"
    for dtype in (torch.bfloat16,) if small else (torch.bfloat16, torch.float32):
        shape = (1, 2, 16, 16) if small else _SHAPE
        yield tried(f"gated delta net {dtype}".replace("torch.", ""), _check, shape, dtype, torch.device(device))
    if not small:
        for requests, nodes in ((1, 1), (1, 16), (1, 64), (8, 8), (32, 2)):
            yield tried(f"gated delta net, {requests} trees of {nodes}", _time, requests, nodes)


class _Layer:
    """A random net, and states of requests: slot 0 is that of the empty text."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, slots: int):
        key_heads, value_heads, key_dim, value_dim = shape
        self.channels, self.made = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
        self.value_heads, self.dtype, self.device = value_heads, dtype, device
        self._generator = torch.Generator().manual_seed(0)
        vectors = (
            self.random(_TAPS, self.channels) * 0.5, -self.random(value_heads).exp(), self.random(value_heads),
            self.random(value_dim),
        )  # fmt: skip
        self.net = DeltaNet(*vectors, 1e-6, *shape)
        state, row = delta_sizes(*shape, _TAPS, dtype.itemsize)
        sizes = StateShape((state,), (row,))
        states, store = (
            torch.zeros(count, size, dtype=torch.uint8, device=device)
            for count, size in ((slots, sizes.slot_bytes), (_ROWS, sizes.row_bytes))
        )
        self.places = LayerStates(states, store, 0, 0)

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator).to(self.device)

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and gates."""
        found = self.random(count, self.channels + self.made), self.random(count, 2 * self.value_heads)
        return found[0].to(self.dtype), found[1].to(self.dtype)

    def run(self, rows: tuple[Tensor, Tensor], requests: Sequence[StateRows]) -> Tensor:
        padded = [F.pad(part, (0, 0, 0, _ROWS - len(part))) for part in rows]
        walk = walk_tensor(requests, _ROWS).to(self.device)
        return run_delta(self.net, padded[0], padded[1], self.places, walk)[: len(rows[0])]

    def text(self, rows: tuple[Tensor, Tensor], first: int, end: int, source: int, goal: int) -> Tensor:
        """Read some of the rows one after the other, from one slot's state to another's."""
        count = end - first
        request = StateRows([], range(-1, count - 1), [], count, [source, goal], [count])
        return self.run((rows[0][first:end], rows[1][first:end]), [request])

    def expected(self, rows: tuple[Tensor, Tensor]) -> Tensor:
        """Return [rows, value_heads * value_dim] float64: the definition, one row after the other."""
        net, (inputs, gates) = self.net, (part.double() for part in rows)
        count, keys = len(inputs), net.key_heads * net.key_dim
        padded = F.pad(inputs[:, : self.channels], (0, 0, _TAPS - 1, 0))
        mixed = F.silu(torch.stack([net.taps[tap] * padded[tap : tap + count] for tap in range(_TAPS)]).sum(0))
        query, key = (
            part.view(count, net.key_heads, net.key_dim).repeat_interleave(net.value_heads // net.key_heads, 1)
            for part in (mixed[:, :keys], mixed[:, keys : 2 * keys])
        )
        query, key = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (query, key))
        value = mixed[:, 2 * keys :].view(count, net.value_heads, net.value_dim)
        beta = gates[:, : net.value_heads].sigmoid()
        kept = (net.decay * F.softplus(gates[:, net.value_heads :] + net.dt_bias)).exp()
        state, found = value.new_zeros(net.value_heads, net.key_dim, net.value_dim), []
        for row in range(count):
            state = state * kept[row, :, None, None]
            delta = beta[row, :, None] * (value[row] - torch.einsum("hkv,hk->hv", state, key[row]))
            state = state + key[row, :, :, None] * delta[:, None]
            found.append(torch.einsum("hkv,hk->hv", state, query[row]) * net.key_dim**-0.5)
        gate = F.silu(inputs[:, self.channels :]).view_as(value)
        normed = F.rms_norm(torch.stack(found), (net.value_dim,), net.norm.double(), net.epsilon)
        return (normed * gate).flatten(1)


def _check(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Record:
    """Check a text, its rows one by one, and its last rows in a tree beside another request."""
    started, past, count = time.perf_counter(), 5, 9
    layer = _Layer(shape, dtype, device, 5)
    rows = layer.rows(count)
    whole, exact = layer.text(rows, 0, count, 0, 1), layer.expected(rows)
    error = float((whole.double() - exact).norm() / exact.norm())
    alone = [layer.text(rows, at, at + 1, 2 if at else 0, 2) for at in range(count)]
    layer.text(rows, 0, past, 0, 3)
    nodes = [0, 1, past, 0, past + 1, 0, past + 2, 0, past + 3]  # two rows of another text, then the tree
    tree = StateRows([], [-1, 0, 0, 2, 2, 4, 4], range(7), 0, [3], [])
    other = StateRows([], range(-1, 1), [], 2, [0, 4], [2])
    found = layer.run((rows[0][nodes], rows[1][nodes]), [other, tree])
    return {
        "right": error < _TOLERANCE[dtype],
        "error": float(f"{error:.2e}"),
        "alone": torch.equal(torch.cat(alone), whole) and torch.equal(*layer.places.states[[1, 2]]),
        "in_tree": torch.equal(found[[2, 4, 6, 8]], whole[past:]) and torch.equal(found[:2], whole[:2]),
        "seconds_with_compiling": round(time.perf_counter() - started, 2),
    }


def _time(requests: int, nodes: int) -> Record:
    """Time one layer over trees of many branches, each after two accepted rows, and count the bytes of the states."""
    layer = _Layer(_SHAPE, torch.bfloat16, torch.device("cuda"), requests + 1)
    parents = [-1, 0, *((node - 1) // 2 + 2 if node else 1 for node in range(nodes))]
    walked = [StateRows([0, 1], parents, range(2, 2 + nodes), 2, [slot, slot], [2]) for slot in range(1, requests + 1)]
    walk = walk_tensor(walked, _ROWS).to(layer.device)
    (inputs, gates), nothing = layer.rows(_ROWS), torch.zeros_like(walk)
    state_bytes = layer.net.value_heads * layer.net.key_dim * layer.net.value_dim * 4
    return {
        "us": replay_us(lambda: run_delta(layer.net, inputs, gates, layer.places, walk), 20),
        "us_empty": replay_us(lambda: run_delta(layer.net, inputs, gates, layer.places, nothing), 20),
        "read_and_written_mb": round(2 * requests * state_bytes / 1e6, 1),
    }

"""Runs one layer with a state on rows of its inputs, without a model: states, kept rows and buffers are arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.core.state_shape import StateShape
from engine.kernels.gemm.matmul import Matmul
from engine.kernels.state.walk import LayerPlace, StateLayer, StateRows, Walk
from engine.kernels.threads import Kernel, address_of

HIDDEN = 48


def rows(count: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Random inputs of a layer."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Matrix:
    """A product in the dtype of its rows."""

    weight: Tensor
    matmul: Matmul | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T.to(x.dtype)


@dataclass
class LayerRun:
    """slots, stored: how many states and kept rows there are."""

    layer: StateLayer
    hidden: int
    dtype: torch.dtype
    slots: int = 6
    stored: int = 64
    buffers: dict[str, Tensor] = field(default_factory=dict)
    _steps: list[tuple[Kernel, np.ndarray[Any, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = StateShape((self.layer.state_bytes,), (self.layer.row_bytes,))
        self.states = np.zeros((self.slots, shape.slot_bytes), np.uint8)
        self.rows = np.zeros((self.stored, shape.row_bytes), np.uint8)
        self.walk = Walk(shape, self.layer.scratch_bytes, self.layer.tile_bytes)
        self._products: list[tuple[Any, str, str]] = []
        self.buffers["x"] = torch.zeros(256, self.hidden, dtype=self.dtype)
        self.made = self.layer.build(self, LayerPlace(0, 0, self.walk.address))

    def buffer(self, name: str, width: int) -> Tensor:
        return self.buffers.setdefault(name, torch.zeros(256, width, dtype=self.dtype))

    def product(self, product: Any, source: str, goal: str, outputs: int) -> None:
        self.buffer(goal, outputs)
        self._products.append((product, source, goal))

    def step(self, kernel: Kernel, records: np.ndarray[Any, Any]) -> None:
        self._steps.append((kernel, records))

    def __call__(self, x: Tensor, requests: Sequence[StateRows]) -> Tensor:
        """Return what the layer makes of the rows x, [rows, hidden], before its last product."""
        self.buffers["x"][: len(x)] = x
        self.walk.begin(requests, int(self.states.ctypes.data), int(self.rows.ctypes.data))
        for product, source, goal in self._products:
            for row in range(len(x)):  # each row alone, as our own products give a row the same bits in any batch
                self.buffers[goal][row] = product(self.buffers[source][row : row + 1])[0]
        for kernel, records in self._steps:
            kernel(address_of(records), 8)
        return self.buffers[self.made][: len(x)].clone()

    def text(self, x: Tensor, source: int, goal: int) -> Tensor:
        """Read rows one after the other: the state of slot `source` becomes that of slot `goal`."""
        n = len(x)
        return self(x, [StateRows([], range(-1, n - 1), [], n, [source, goal], [n])])

    def one_by_one(self, x: Tensor, slot: int) -> Tensor:
        """Read rows as `text` does, with a forward for each row, in one slot."""
        return torch.cat([self.text(row[None], slot, slot) for row in x])

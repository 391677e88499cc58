"""Gated delta nets (Qwen3-Next, Qwen3.5): a row decays the state of each value head, corrects what it recalls for the
row's key, and reads it with the row's query.

    S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q;   out = Wo (RMSNorm(o) * w * SiLU(z))

S [key_dim, value_dim] is float32. q, k and v are what a causal convolution and SiLU make of the row's inputs and those
before it; q and k are then divided by their lengths.

Kimi Linear's nets (KDA) decay each row of S by a share of its own, and the gate of what is read is a sigmoid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.kernels.gemm.matmul import Multiplies
from engine.kernels.simd import LANES
from engine.kernels.state.delta_kernels import DELTA, delta_inputs_kernel, delta_kernel, delta_out_kernel
from engine.kernels.state.walk import BuildsSteps, LayerPlace
from engine.kernels.state.windows import window_bytes


def delta_sizes(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, taps: int, width: int, by_channel: bool = False
) -> tuple[int, int]:
    """Bytes of a layer's state, and of what is kept of a row. width: bytes of a number of its inputs. by_channel:
    whether each channel of a key decays by itself.
    """
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    gates = value_heads + key_heads * key_dim if by_channel else 2 * value_heads
    return (
        window_bytes(channels, taps, width) + 4 * value_heads * key_dim * value_dim,
        (channels + gates) * width,
    )


@dataclass(frozen=True)
class ChannelGates:
    """What makes a decay for each channel of each key, and a gate for each number that is read: of hidden, by way of as
    many numbers as `rank`. forget_bias: [key_heads * key_dim] float32.
    """

    forget: tuple[Multiplies, Multiplies]
    out: tuple[Multiplies, Multiplies]
    forget_bias: Tensor
    rank: int


@dataclass(frozen=True)
class GatedDelta:
    """inputs: hidden to q and k of each key head, then v and z of each value head; gates: to b and a of each value
    head. taps: [taps, channels of q, k and v] float32; decay: -exp(A); norm: [value_dim] float32. key_head_of: the key
    head of each value head, int32. width: bytes of a number of rows. by_channel: if it is there, `inputs` make no z,
    `gates` no a, and `dt_bias` counts for nothing.
    """

    inputs: Multiplies
    gates: Multiplies
    out: Multiplies
    taps: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    epsilon: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    key_head_of: Tensor
    width: int
    by_channel: ChannelGates | None = None

    @property
    def _sizes(self) -> tuple[int, int]:
        sizes = self.key_heads, self.value_heads, self.key_dim, self.value_dim
        return delta_sizes(*sizes, len(self.taps), self.width, self.by_channel is not None)

    @property
    def state_bytes(self) -> int:
        return self._sizes[0]

    @property
    def row_bytes(self) -> int:
        return self._sizes[1]

    @property
    def scratch_bytes(self) -> int:
        channels: int = self.taps.shape[1]
        decays = 0 if self.by_channel is None else 2 * self.key_heads * self.key_dim
        return 4 * (channels + 2 * self.value_heads + self.key_heads + decays)

    @property
    def tile_bytes(self) -> int:
        return 4 * self.key_dim * LANES

    def build(self, program: BuildsSteps, place: LayerPlace) -> str:
        """See `StateLayer`."""
        channels, made = self.taps.shape[1], self.value_heads * self.value_dim
        whole = channels + (made if self.by_channel is None else 0)
        gate_count = (1 if self.by_channel is not None else 2) * self.value_heads
        program.product(self.inputs, "x", "state_inputs", whole)
        program.product(self.gates, "x", "state_gates", gate_count)
        inputs, gates = program.buffer("state_inputs", whole), program.buffer("state_gates", 0)
        record = np.zeros(1, DELTA)
        fields = {
            "walk": place.walk,
            "inputs": inputs.data_ptr(),
            "inputs_stride": inputs.stride(0) * inputs.itemsize,
            "out_gates": inputs.data_ptr() + channels * inputs.itemsize,
            "out_gates_stride": inputs.stride(0) * inputs.itemsize,
            "gates": gates.data_ptr(),
            "gate_count": gate_count,
            "state_at": place.state,
            "row_at": place.row,
            "taps": self.taps.data_ptr(),
            "decay": self.decay.data_ptr(),
            "dt_bias": self.dt_bias.data_ptr(),
            "norm": self.norm.data_ptr(),
            "key_head_of": self.key_head_of.data_ptr(),
            "out": program.buffer("mixed", made).data_ptr(),
            "key_heads": self.key_heads,
            "value_heads": self.value_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "tap_count": len(self.taps),
            "channels": channels,
            "width": self.width,
            "window_bytes": window_bytes(channels, len(self.taps), self.width),
            "epsilon": self.epsilon,
            "query_scale": 1 / math.sqrt(self.key_dim),
        }
        if self.by_channel is not None:
            fields |= self._build_gates(program, self.by_channel)
        for name, value in fields.items():
            record[name] = value
        for step in (delta_inputs_kernel, delta_kernel, delta_out_kernel):
            program.step(step(), record)
        return "mixed"

    def _build_gates(self, program: BuildsSteps, gates: ChannelGates) -> dict[str, int]:
        """Add the products of the gates of channels. Returns their fields of the record."""
        found = {"sigmoid": 1, "forget_bias": gates.forget_bias.data_ptr()}
        made = (("forget", gates.forget, self.key_heads * self.key_dim),)
        for name, (low, high), count in (*made, ("out_gates", gates.out, self.value_heads * self.value_dim)):
            program.product(low, "x", "state_rank", gates.rank)
            program.product(high, "state_rank", f"state_{name}", count)
            rows = program.buffer(f"state_{name}", count)
            found |= {name: rows.data_ptr()} | ({f"{name}_stride": count * rows.itemsize} if name != "forget" else {})
        return found

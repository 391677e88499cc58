"""Every kernel of exact attention on CPUs, for tests and `talon check --kernels`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from engine.core.kv_shape import KVShape
from engine.kernels.attention.code_attention import code_kernel
from engine.kernels.attention.code_pair_attention import code_pair_kernel
from engine.kernels.attention.lane_attention import lane_kernel
from engine.kernels.attention.pair_attention import pair_kernel
from engine.kernels.attention.tile_attention import tile_kernel
from engine.kernels.gemm.int8.dots import InstructionSet, instruction_sets
from engine.kernels.gemm.matmul import Unit, units
from engine.kernels.threads import Kernel


class AttentionKernel(NamedTuple):
    """A kernel, and the pool that it reads. instructions: what a processor needs for it; runs: whether this one has
    them.
    """

    name: str
    instructions: str
    runs: bool
    compiled: Callable[[], Kernel]
    dtype: torch.dtype
    vnni: bool = False
    q8_0: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.instructions}, {str(self.dtype).removeprefix('torch.')}"

    def shape(self, layers: int, kv_heads: int, head_dim: int) -> KVShape:
        """Return the shape of a pool that this kernel reads."""
        return KVShape(layers, kv_heads, head_dim, self.dtype, self.vnni, self.q8_0)


def every_attention_kernel() -> tuple[AttentionKernel, ...]:
    """Return every kernel, including those that this processor cannot run."""
    both = torch.float32, torch.bfloat16
    pairs, whole = Unit.VECTORS in units(), instruction_sets()
    return (
        AttentionKernel("tiles", "AMX", Unit.AMX in units(), tile_kernel, torch.bfloat16, vnni=True),
        AttentionKernel("pairs", "AVX512-BF16", pairs, pair_kernel, torch.bfloat16, vnni=True),
        *(AttentionKernel("lanes", "any", True, lane_kernel, dtype) for dtype in both),
        AttentionKernel(
            "pairs of codes", "AVX512-BF16", pairs and bool(whole), code_pair_kernel, torch.bfloat16, True, True
        ),
        *(
            AttentionKernel("codes", used.title, used in whole, partial(code_kernel, used), dtype, False, True)
            for used in InstructionSet
            for dtype in both
        ),
    )

"""`python -m tests.engine.model.compile_kernels` compiles the Triton kernels without a GPU, as launches would; with
`all`, each shape for each capability.

It is a process of its own, because Triton cannot compile where it interprets. It prints a JSON line for each kernel:
name (of the shape), dtype, capability, spills (bytes), registers (of a thread), threads and shared (bytes) of a
program.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

from drafters.heads.growth import growth_kernel
from drafters.heads.growth.growth_kernel import Grounds, TreeLayer
from engine.core.kv_shape import KVShape
from engine.kernels.attention.attention import Rule
from engine.kernels.layer.weights import Norm
from engine.model.cuda import delta_kernels, layer_kernels, noise_kernels, triton_attention, walk_kernels
from engine.model.cuda.delta_kernels import DeltaNet, LayerStates
from engine.model.cuda.device_rows import DeviceRows
from engine.model.cuda.triton_attention import TritonAttention
from engine.model.kv_pool import KVPool

CAPABILITIES = (80, 90)
BF16, FP32 = torch.bfloat16, torch.float32
_HIDDEN = 4096
PLAIN, CAPPED = Rule(0.1), Rule(0.1, softcap=30.0)


class Shape(NamedTuple):
    """groups: query heads per KV head."""

    name: str
    kv_heads: int
    groups: int
    head_dim: int
    dtype: torch.dtype
    rule: Rule = PLAIN


SHAPES = [  # Head sizes from end to end; of each size the most rows of a product, and each kind of rule once.
    Shape("llama 8b", 8, 4, 128, BF16),
    Shape("smollm2", 3, 3, 64, BF16),
    Shape("gemma2", 4, 2, 256, BF16, CAPPED),
    Shape("gemma2", 4, 2, 256, FP32, CAPPED),
    Shape("phi3", 32, 1, 96, BF16),
    Shape("heads of 8", 1, 2, 8, FP32),
    Shape("gpt_oss", 8, 8, 64, BF16, Rule(0.1, window=128, sinks=torch.zeros(64))),
]
FOR_NEWEST = (SHAPES[0], SHAPES[2], SHAPES[3], SHAPES[5], SHAPES[6])
FOR_OLDER = (SHAPES[0], SHAPES[3])
"""What is compiled in any case: each type, each kind of rule, large heads and small ones."""
LEAN = ("llama 8b", "heads of 8")  # shapes whose other kernels are compiled too


class NoGpu(CudaDriver):
    """Stands for a GPU of that compute capability, for which kernels are compiled and not launched."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # each capability has a cache of compiled kernels

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """A kernel whose launches only compile it. spills: bytes of registers that the assembler keeps in memory, and
    registers: of a thread, by hash of what was compiled; the assembler writes them to Triton's log when it compiles,
    which raises if it cannot.
    """

    def __init__(self, kernel: Any):
        self.kernel, self.found = kernel, []
        self.spills: dict[str, int] = {}
        self.registers: dict[str, int] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **named: self.found.append(self._compiled(*given, grid=grid, **named))

    def _compiled(self, *given: Any, **named: Any) -> Any:
        with redirect_stdout(io.StringIO()) as log:
            kernel = self.kernel.warmup(*given, **named)
        if found := re.findall(r"(\d+) bytes spill stores", log.getvalue()):
            self.spills[kernel.hash] = sum(map(int, found))
            self.registers[kernel.hash] = max(map(int, re.findall(r"Used (\d+) registers", log.getvalue())))
        return kernel


def launch(shape: Shape) -> None:
    """Launch what a layer launches."""
    pool = KVPool(KVShape(1, shape.kv_heads, shape.head_dim, shape.dtype), 2)
    rows = DeviceRows(*(torch.zeros(16, dtype=torch.int32) for _ in DeviceRows._fields))
    query = torch.zeros(64, shape.kv_heads * shape.groups, shape.head_dim, dtype=shape.dtype)
    TritonAttention(pool, shape.groups)(rows, 0, shape.rule, query)
    if shape.name in LEAN:
        launch_lean(shape, pool)


def launch_lean(shape: Shape, pool: KVPool) -> None:
    """Launch what lean layers launch beside attention."""
    places: Any = SimpleNamespace(
        **{name: torch.zeros(2, dtype=torch.int64) for name in ("positions", "sources", "blocks", "lanes")}
    )
    cos_sin, norms = torch.zeros(4, shape.head_dim), torch.zeros(2, shape.head_dim)
    width = (shape.groups + 2) * shape.kv_heads * shape.head_dim
    layer_kernels.entered(pool, 0, torch.zeros(2, width, dtype=shape.dtype), places, cos_sin, norms, 1e-6)
    x = torch.zeros(2, _HIDDEN, dtype=shape.dtype)
    layer_kernels.normed(x.float(), x, Norm(torch.zeros(_HIDDEN), 1e-6))
    layer_kernels.gated(x)
    attended = torch.zeros(2, shape.kv_heads * shape.groups, shape.head_dim, dtype=shape.dtype)
    layer_kernels.opened(attended, torch.zeros(2, 2 * width, dtype=shape.dtype))
    keys = torch.zeros(2, dtype=torch.int64)
    noise_kernels.noisy_scores(torch.zeros(2, 5000), torch.zeros(5000, dtype=torch.int64), keys, [0.5] * 2)
    noise_kernels.likeliest(torch.zeros(2, 5000, dtype=shape.dtype), torch.zeros(5000, dtype=torch.int64), 10)
    launch_draws(shape, pool)
    launch_growth()
    launch_delta(shape.dtype)


def launch_draws(shape: Shape, pool: KVPool) -> None:
    """Launch what follows a forward."""
    numbers, keys = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    noise_kernels.draw_tokens(torch.zeros(2, 5000, dtype=shape.dtype), numbers, keys, torch.zeros(2), numbers)
    paths, lengths, _ = walk_kernels.walk_trees(numbers, numbers, numbers, numbers, 9)
    walk_kernels.move_paths(pool, paths, lengths, numbers, numbers, numbers)
    walk_kernels.check_blocks(pool, numbers, torch.zeros(2, 1, dtype=torch.int8))
    states, sent = torch.zeros(2, 3, _HIDDEN), torch.zeros(1, 9, 3 * _HIDDEN, dtype=torch.bfloat16)
    walk_kernels.gather_path_rows(states, numbers, paths, lengths, numbers, sent)


def launch_growth() -> None:
    """What is launched between the layers of trees that grow on the device."""
    above = TreeLayer(torch.ones(20, dtype=torch.float64), torch.zeros(20, dtype=torch.int64), torch.zeros(20, 7).int())
    tokens, prob, slots = torch.zeros(20, 10, dtype=torch.int64), torch.zeros(20, 10), torch.zeros(2, dtype=torch.int32)
    grounds = Grounds(*(torch.zeros(2, dtype=torch.int64) for _ in Grounds._fields))
    growth_kernel.select(tokens, prob, above, grounds, slots, 2, 10, 64)


def launch_delta(dtype: torch.dtype) -> None:
    """Launch what a gated delta net of the largest files launches."""
    key_heads, value_heads, size, channels = 16, 32, 128, 8192
    vectors = torch.zeros(4, channels), torch.zeros(value_heads), torch.zeros(value_heads), torch.zeros(size)
    net = DeltaNet(*vectors, 1e-6, key_heads, value_heads, size, size)
    states, store = torch.zeros(1, 1 << 22, dtype=torch.uint8), torch.zeros(1, 1 << 15, dtype=torch.uint8)
    inputs, gates = torch.zeros(2, channels + 4096, dtype=dtype), torch.zeros(2, 2 * value_heads, dtype=dtype)
    delta_kernels.run_delta(net, inputs, gates, LayerStates(states, store, 0, 0), torch.zeros(64, dtype=torch.int32))


def main() -> None:
    places = [(triton_attention, name) for name in ("_attend_texts", "_attend_rows")]
    places += [(layer_kernels, name) for name in ("enter", "norm", "gate", "open_gates")]
    places += [(delta_kernels, name) for name in ("enter_rows", "walk_states", "leave_rows", "keep_windows")]
    places += [(noise_kernels, name) for name in ("draw_parts", "join_parts", "score_noisily", "rank")]
    places += [(walk_kernels, name) for name in ("walk", "move", "gather", "check")] + [(growth_kernel, "_select")]
    kernels = [Compiled(getattr(*place)) for place in places]
    for (module, name), kernel in zip(places, kernels, strict=True):
        setattr(module, name, kernel)
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
    for capability in CAPABILITIES:
        triton.runtime.driver.set_active(NoGpu(capability))
        triton_attention.has_wgmma = lambda device, capability=capability: capability >= 90
        some = FOR_NEWEST if capability == CAPABILITIES[-1] else FOR_OLDER
        for shape in SHAPES if sys.argv[1:] == ["all"] else some:
            launch(shape)
            for kernel, one in [(one.found.pop(), one) for one in kernels if one.found]:
                print(json.dumps({
                    "name": shape.name, "dtype": str(shape.dtype), "capability": capability,
                    "kernel": kernel.metadata.name, "spills": one.spills[kernel.hash],
                    "registers": one.registers[kernel.hash], "threads": 32 * kernel.metadata.num_warps,
                    "shared": kernel.metadata.shared,
                }))  # fmt: skip


if __name__ == "__main__":
    main()

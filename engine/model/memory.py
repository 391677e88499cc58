"""Finds how much memory a process can take on this machine or in its container, checks that a model fits into it, and
makes the pool of keys and values in its share of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from engine.config import AUTO, KVType, Weights
from engine.core.errors import ModelError
from engine.core.kv_shape import KVShape
from engine.core.state_shape import StateShape
from engine.kernels.attention.attention import has_pairs
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.kernels.quant.layouts import STEP
from engine.kernels.quant.stored import row_bytes
from engine.model.kv_pool import KVPool
from engine.model.state_pool import ROWS, StatePool
from engine.weights.gguf.file import GgufFile
from engine.weights.quantised_weights import QuantisedCheckpoint

_UNKNOWN = 4 << 30  # if Linux does not say
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""For both cgroup versions: the files of the limit and of the usage, and the entry for page cache not used lately."""
_KV_SHARE = 0.25  # of free memory
_STATES_SHARE = 0.5  # of the room for keys and values, in models with layers of both kinds
_FEWEST_STATES, _MOST_STATES = 4, 1024  # two of one request at a time, and snapshots
_FEWEST_BLOCKS = 16  # of keys and values beside states
_BESIDE = 600_000_000  # bytes: libraries, compiled kernels, and a layer as bfloat16 while it is tried
_GROWTH = 1.05  # of the matrices; bytes of keys and values are a share of what is left
_BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "IQ4_XS": 4.3, "Q3_K_M": 4.1, "Q2_K": 3.1}
"""The bits of a weight in memory, by the names under which files are published, the largest first."""
_QUANTISED_BITS = {name: 8 * row_bytes(name.upper(), STEP) / STEP for name in get_args(Weights) if name != AUTO}
"""Bits of a weight in memory when quantised at load."""


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free bytes, without swapping. The page cache counts as free, since Linux releases it when memory is
    needed.
    """
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    free = int(found[1]) * 1024 if found else _UNKNOWN
    for limit, used, stat, name in _CGROUPS:
        most, taken = _text(cgroup / limit).strip(), _text(cgroup / used).strip()
        if most.isdecimal() and taken.isdecimal():
            cached = re.search(rf"^{name} (\d+)$", _text(cgroup / stat), re.MULTILINE)
            free = min(free, max(0, int(most) - int(taken) + (int(cached[1]) if cached else 0)))
    return free


def kv_room(kv_memory: int | None, device: torch.device, weights: int = 0) -> int:
    """Return the bytes for keys and values. kv_memory: as the configuration says; None: a share of what is free once
    `weights` bytes have been read.
    """
    if kv_memory is not None:
        return kv_memory
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    return int(_KV_SHARE * (free - weights))


def kept_as(kv_type: KVType, device: torch.device) -> KVType:
    """Return the type in which the device keeps keys and values that are to be kept as `kv_type`."""
    return kv_type if device.type == "cpu" and instruction_sets() else "auto"


def pool_of(
    sizes: Sequence[tuple[int, int, int]],
    dtype: torch.dtype,
    kv_type: KVType,
    room: int,
    device: torch.device,
    states: StateShape | None = None,
) -> KVPool:
    """Make a pool of `room` bytes. sizes: for each of its parts, the layers with keys and values, the KV heads, and the
    dimensions of a head. kv_type: see `kept_as`. states: of layers with a state, which get a share of the room. Raises
    ModelError if that is too little.
    """
    pairs = device.type != "cuda" and has_pairs(dtype)
    shapes, layer_states = [KVShape(*size, dtype, pairs, kv_type == "q8_0") for size in sizes], None
    block_bytes = sum(shape.block_bytes for shape in shapes)
    if states is not None:
        rows = ROWS * states.row_bytes
        share = int(_STATES_SHARE * max(0, room - rows)) // states.slot_bytes
        slots = max(_FEWEST_STATES, min(_MOST_STATES, share))
        needed = slots * states.slot_bytes + rows + _FEWEST_BLOCKS * block_bytes
        if share < _FEWEST_STATES and needed > room:
            raise ModelError(
                f"verifier.kv_memory: {room / 1e6:.0f} MB have no room for keys and values beside {slots} states of "
                f"{states.slot_bytes / 1e6:.1f} MB; set {-(-needed // 10**6)} MB or more"
            )
        layer_states = StatePool(states, slots, device)
        room -= layer_states.memory
    return KVPool(shapes, max(1, room // block_bytes), device, layer_states)


def check_memory(stored: GgufFile | QuantisedCheckpoint, field: str, free_bytes: int) -> None:
    """Raise ModelError if the weights, which are not read yet, need more memory than is free. It names the next smaller
    choice.
    """
    packed = stored.packed_size if isinstance(stored, GgufFile) else stored.size
    needed = int(_GROWTH * packed) + _BESIDE
    if needed <= free_bytes:
        return
    if isinstance(stored, GgufFile):
        what, bits, said = "the file", _BITS, "its "
    elif stored.packed:
        what, bits, said = "the checkpoint", {}, ""
    else:
        what, bits, said = f"the model as {stored.kind.lower()},", _QUANTISED_BITS, "weights="
    sizes = {name: _GROWTH * size / 8 * stored.elements + _BESIDE for name, size in bits.items()}
    fitting = next((name for name, size in sizes.items() if size <= free_bytes and size < needed), None)
    choice = "a model of fewer parameters" if fitting is None else f"{said}{fitting} ({sizes[fitting] / 1e9:.1f} GB)"
    raise ModelError(
        f"{field}: {what} of {stored.size / 1e9:.1f} GB needs {needed / 1e9:.1f} GB of memory, and "
        f"{free_bytes / 1e9:.1f} GB are free; take {choice}, or free memory"
    )


def check_whole_memory(stored: GgufFile, dtype: torch.dtype, field: str, why: str, free_bytes: int) -> None:
    """Raise ModelError if a file does not fit in memory as numbers of that type. why: the reason why it has to."""
    needed = dtype.itemsize * stored.elements + _BESIDE
    if needed > free_bytes:
        raise ModelError(
            f"{field}: {why}, which needs {needed / 1e9:.1f} GB of memory, where {free_bytes / 1e9:.1f} GB are free; "
            "take a model of fewer parameters, or free memory"
        )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf8")
    except OSError:
        return ""

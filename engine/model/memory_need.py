"""Whether a GGUF file fits into memory, estimated before it is read."""

from __future__ import annotations

from engine.core.errors import ModelError
from engine.weights.gguf_file import GgufFile

_BESIDE = 600_000_000  # bytes: libraries, compiled kernels, and a layer as bfloat16 while it is tried
_GROWTH = 1.05  # of the blocks in memory; bytes of keys and values are a share of what is left
_BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "IQ4_XS": 4.3}
"""Of a weight, by the names under which files are published, the largest first."""


def check_memory(gguf: GgufFile, field: str, free_bytes: int) -> None:
    """Raise ModelError, which names the next smaller choice, if the file needs more memory than is free."""
    needed = int(_GROWTH * gguf.size) + _BESIDE
    if needed <= free_bytes:
        return
    sizes = {name: _GROWTH * bits / 8 * gguf.elements + _BESIDE for name, bits in _BITS.items()}
    fitting = next((name for name, size in sizes.items() if size <= free_bytes and size < needed), None)
    choice = "a model of fewer parameters" if fitting is None else f"its {fitting} ({sizes[fitting] / 1e9:.1f} GB)"
    raise ModelError(
        f"{field}: the file of {gguf.size / 1e9:.1f} GB needs {needed / 1e9:.1f} GB of memory, and "
        f"{free_bytes / 1e9:.1f} GB are free; take {choice}, or free memory"
    )

"""The products of an 8B model. Are cuBLASLt's the fastest? Are products of our own, which could read weights of four
bits or do what follows the product, as fast and the same to the bit?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.cuda_products import forbid_split_sums

from .candidates import coded, product
from .findings import Record, tried
from .times import replay_us

_SHAPES = {  # outputs, inputs
    "q, o": (4096, 4096), "qkv": (6144, 4096), "gate and up": (28672, 4096), "down": (4096, 14336),
    "lm_head": (128256, 4096),
}  # fmt: skip
_SMALL = {"small": (96, 64)}
_ROWS = (1, 16, 64, 256)
_CACHE = 256 << 20  # more than a GPU's cache holds: weights are read from memory


def run(device: str) -> Iterator[Record]:
    yield tried("split-K is forbidden", lambda: {"forbidden": device == "cpu" or forbid_split_sums()})
    with torch.inference_mode():
        for name, shape in (_SHAPES if device == "cuda" else _SMALL).items():
            yield tried(name, _compare, shape, device)


def _compare(shape: tuple[int, int], device: str) -> Record:
    """Return, for each number of rows, whether the results have the same bits, microseconds, and the weights' GB/s."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * shape[1] ** -0.5
    x = torch.randn(max(_ROWS), shape[1], generator=generator, device=device, dtype=torch.bfloat16)
    codes, scales, meant = coded(weight)
    whole = F.linear(x, weight)
    found: Record = {
        "library_same_bits": {rows: torch.equal(F.linear(x[:rows], weight), whole[:rows]) for rows in _ROWS},
        "ours_same_bits": {rows: torch.equal(product(x[:rows], weight), F.linear(x[:rows], weight)) for rows in _ROWS},
        "coded_same_bits": {
            rows: torch.equal(product(x[:rows], codes, scales), product(x[:rows], meant)) for rows in _ROWS
        },
        "error": float(f"{float((product(x, weight) - whole).float().norm() / whole.float().norm()):.2e}"),
    }
    if device == "cuda":
        bits = codes.nbytes + scales.nbytes
        found["library"] = {
            rows: _time(lambda x, w: F.linear(x, w), x[:rows], [weight], weight.nbytes) for rows in _ROWS
        }
        found["ours"] = {rows: _time(product, x[:rows], [weight], weight.nbytes) for rows in _ROWS}
        found["coded"] = {rows: _time(product, x[:rows], [codes, scales], bits) for rows in _ROWS}
    return found


def _time(multiply: Callable[..., Tensor], x: Tensor, weights: list[Tensor], size: int) -> Record:
    """Time a product whose weights, of `size` bytes, are read from memory; launches are not counted."""
    copies = [[part.clone() for part in weights] for _ in range(max(1, _CACHE // size))]

    def work() -> None:
        for parts in copies:
            multiply(x, *parts)

    us = replay_us(work, 2) / len(copies)
    return {"us": round(us, 1), "gb_per_s": round(size / us / 1e3)}

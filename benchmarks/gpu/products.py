"""The products of an 8B model: which numbers of rows give a row the same bits, and how long do they take?

cuBLAS picks a kernel by the number of rows. Do a row's place, the other rows, a captured graph or another process
change its bits? Which numbers of rows give the same bits as others? This is asked once as torch is by default, once
with the flags that forbid to split a sum over blocks (split-K), which torch takes with cuBLASLt alone, and once of a
product in Triton.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .findings import Record, tail, tried
from .times import replay_us

_SHAPES = {  # outputs, inputs
    "q, o": (4096, 4096), "k, v": (1024, 4096), "qkv": (6144, 4096), "gate, up": (14336, 4096),
    "gate and up": (28672, 4096), "down": (4096, 14336), "lm_head": (128256, 4096),
}  # fmt: skip
_SMALL = {"small": (96, 64)}
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_BUCKETS = (16, 64, 256, 1024)
_TIMED = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
_FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
_WAYS: dict[str, dict[str, str]] = {
    "default": {},
    "no split-K": _FIXED,
    "no split-K, again": _FIXED,
    "triton": {},
}
_ON_A_CPU = ("default", "triton")


Multiply = Callable[[Tensor, Tensor], Tensor]


def run(device: str) -> Iterator[Record]:
    digests: dict[str, str] = {}
    for way, environment in _WAYS.items():
        if device == "cpu" and way not in _ON_A_CPU:
            continue
        command = [sys.executable, "-m", __name__, device, way]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
        for line in done.stdout.splitlines():
            record = json.loads(line)
            key = record["check"]
            if way == "no split-K":
                digests[key] = record.get("digest", "")
            if way == "no split-K, again":  # the second process is there for this alone
                record = {"check": key, "same_in_two_processes": record.get("digest") == digests.get(key)}
            yield {"way": way, **record}
        if done.returncode:
            yield {"way": way, "failed": tail(done.stderr)}


def main(device: str, way: str) -> None:
    """Print the findings of one way, in a process of its own: flags count from the first product on."""
    multiply: Multiply = F.linear
    if way == "triton":
        from .triton_product import product

        multiply = product
    elif way != "default":
        matmul: Any = torch.backends.cuda.matmul
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
    timed = device == "cuda" and "again" not in way
    with torch.inference_mode():
        for name, shape in (_SHAPES if device == "cuda" else _SMALL).items():
            print(json.dumps(tried(name, _product, multiply, shape, device, timed)), flush=True)


def _product(multiply: Multiply, shape: tuple[int, int], device: str, timed: bool) -> Record:
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * shape[1] ** -0.5
    x = torch.randn(max(_ROWS), shape[1], generator=generator, device=device, dtype=torch.bfloat16)
    alone = {rows: multiply(x[:rows], weight)[0] for rows in _ROWS}
    digest = hashlib.sha256()
    for row in alone.values():
        digest.update(row.view(torch.uint8).cpu().numpy().tobytes())
    exact = x[:64].double() @ weight[:64].double().T
    error = (multiply(x[:64], weight)[:, :64].double() - exact).norm() / exact.norm()
    found: Record = {
        "error": float(f"{float(error):.2e}"),
        "same_bits": _groups(alone),
        "place": {rows: _same_at_any_place(multiply, x, weight, rows) for rows in _BUCKETS},
        "replay": device != "cuda" or all(_same_replayed(multiply, x, weight, rows) for rows in _BUCKETS),
        "digest": digest.hexdigest()[:12],
    }
    if timed:
        # more copies than the cache holds
        copies = [weight.clone() for _ in range(max(1, (256 << 20) // weight.nbytes))]
        found["us"] = {rows: _time(multiply, x[:rows], copies) for rows in _TIMED}
    return found


def _groups(found: dict[int, Tensor]) -> list[list[int]]:
    """Group the numbers of rows with which the first row has the same bits."""
    groups: list[list[int]] = []
    for rows, row in found.items():
        group = next((g for g in groups if torch.equal(found[g[0]], row)), None)
        if group is None:
            groups.append([rows])
        else:
            group.append(rows)
    return groups


def _same_at_any_place(multiply: Multiply, x: Tensor, weight: Tensor, rows: int) -> bool:
    """Return whether each row has the same bits beside zeros, at its place, and at other places among the others."""
    expected = multiply(x[:rows], weight)
    single = torch.zeros_like(x[:rows])
    single[rows - 1] = x[0]
    same: bool = torch.equal(multiply(single, weight)[rows - 1], expected[0])
    for shift in {1, 3, rows // 2 + 1, rows - 1}:
        same &= torch.equal(multiply(x[:rows].roll(shift, 0), weight), expected.roll(shift, 0))
    return same


def _same_replayed(multiply: Multiply, x: Tensor, weight: Tensor, rows: int) -> bool:
    given = x[:rows].clone()
    expected = multiply(given, weight)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = multiply(given, weight)
    graph.replay()
    same: bool = torch.equal(out, expected)
    return same


def _time(multiply: Multiply, x: Tensor, copies: list[Tensor]) -> float:
    """Return microseconds of a product, its weights read from memory, launches not counted."""

    def work() -> None:
        for weight in copies:
            multiply(x, weight)

    return round(replay_us(work, 2) / len(copies), 1)


if __name__ == "__main__":
    main(*sys.argv[1:])

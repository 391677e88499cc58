"""Finds versions and flags, and whether a toy graph is captured and replayed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.device import own_stream, wait
from engine.model.cuda.graphs import Recorded, bucket

from .findings import Record, tried

_PACKAGES = ("torch", "triton", "transformers", "numpy", "numba", "llvmlite", "pyzmq", "msgspec", "pydantic")


def run(device: str) -> Iterator[Record]:
    yield tried("versions", _versions, device)
    yield tried("imports", _imports)
    for name in ("eager", "captured", "captured in a stream of its own"):
        yield tried(f"toy graph, {name}", _toy_graph, name, torch.device(device))


def _versions(device: str) -> Record:
    found = {name: _version(name) for name in _PACKAGES}
    matmul = torch.backends.cuda.matmul
    card: Record = {}
    if device == "cuda":
        what = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        card = {
            "card": what.name, "capability": f"{what.major}.{what.minor}", "free_gb": free >> 30,
            "total_gb": total >> 30, "cuda": torch.version.cuda, "multiprocessors": what.multi_processor_count,
        }  # fmt: skip
    flags = {
        "tf32": matmul.allow_tf32,
        "bf16_reduced": str(matmul.allow_bf16_reduced_precision_reduction),
        "blas": str(torch.backends.cuda.preferred_blas_library()),
        **{name: os.environ.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")},
    }
    return {"python": platform.python_version(), "cores": os.cpu_count(), **found, **card, "flags": flags}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _imports() -> Record:
    """Return the modules that a worker imports."""
    import drafters.registry
    import engine.model.target
    import engine.verifier.loop

    return {"modules": [m.__name__ for m in (drafters.registry, engine.model.target, engine.verifier.loop)]}


def _toy_graph(how: str, device: torch.device) -> Record:
    """Compare a row's product and sum with the same work called directly."""

    def work(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x @ y, x.sum(0)

    same, equal = Recorded(work, device), True
    with torch.inference_mode(), own_stream(device, urgent="own" in how):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x, y = (torch.randn(bucket(40), 64, generator=generator).to(device) for _ in range(2))
            inputs = x, y.T.contiguous()
            found = same(*inputs) if how != "eager" else work(*inputs)
            equal &= all(map(torch.equal, found, work(*inputs)))
        wait(device)
    return {"equal": equal, "graph": same._graph is not None, "captures": Recorded.captures}

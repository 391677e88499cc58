"""Where the time of a forward goes: products, attention, other kernels and operations, and the gaps between them.

The lean decoder is one program whose steps can be timed; its work outside the program is wrapped while it is profiled.
Any other forward makes a thousand calls of torch, which torch's profiler records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from engine.device import wait
from engine.kernels.attention.attention import attention_kernels
from engine.kernels.gemm.matmul_kernels import product_kernel
from engine.kernels.gemm.product import PackedLinear, Product
from engine.kernels.layer.experts import experts_kernel
from engine.kernels.threads import Kernel, Program, Timed
from engine.model.decoder import LeanDecoder
from engine.model.masked import MaskedForward
from engine.model.target import Target

PARTS = ("products", "attention", "other", "gaps")
Seconds = dict[str, float]

_PRODUCTS = {"products", "linear", "_linear_pointwise", "matmul", "mm", "bmm", "addmm", "baddbmm"}
_GPU_PRODUCTS = ("gemm", "gemv", "cutlass", "xmma", "nvjet")


def multiplied(target: Target) -> int:
    """Return the number of weights that every row of a forward is multiplied with."""
    forward = target.forward
    if isinstance(forward, LeanDecoder):
        products = [product for layer in forward.layers for product in layer.products]
        return sum(product.inputs * product.outputs for product in [*products, forward.head])
    numbers = 0
    for module in target.model.modules():
        if isinstance(module, PackedLinear):
            numbers += module.in_features * module.out_features
        elif not isinstance(module, torch.nn.Embedding):
            numbers += sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() > 1)
    return numbers


def forward_name(target: Target) -> str:
    """Return the kind of forward that the target runs."""
    if isinstance(target.forward, MaskedForward):
        return "stock forward with masks"
    return "lean decoder" if isinstance(target.forward, LeanDecoder) else "stock forward with exact attention"


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds until the work is done."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def split(target: Target, work: Callable[[], Any]) -> Seconds:
    """Return the seconds of each part of one forward of the target. Profiling slows it down: scale to the unprofiled
    time.
    """
    if isinstance(target.forward, LeanDecoder):
        clock = Clock()
        with clock.watching():
            took = timed(work, target.device)
        seconds = clock.seconds()
    else:
        seconds, took = _profiled(work, target.device)
    return seconds | {"gaps": max(0.0, took - sum(seconds.values()))}


class Clock:
    """Time spent in calls, by part; a nested call counts only for its own part."""

    def __init__(self) -> None:
        self._called: Seconds = dict.fromkeys(PARTS[:-1], 0.0)
        self._steps: list[Timed] = []
        self._inner = 0.0

    def seconds(self) -> Seconds:
        """Return the seconds of each part but the gaps. Adding them up during a forward would look like a gap."""
        seconds, parts = dict(self._called), _parts_of_kernels()
        for address, took in chain.from_iterable(timed.seconds() for timed in self._steps):
            seconds[parts.get(address, "other")] += took
        return seconds

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            started, outer = time.perf_counter(), self._inner
            self._inner = 0.0
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                self._called[part] += took - self._inner
                self._inner = outer + took

        return watched

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the products and the programs. A product counts in full, with its padding rows."""
        with ExitStack() as patches:
            patches.enter_context(patch.object(Product, "__call__", self.around("products", Product.__call__)))
            patches.enter_context(patch.object(Program, "run", partialmethod(Program.run, timed=self._steps)))
            yield


def _profiled(work: Callable[[], Any], device: torch.device) -> tuple[Seconds, float]:
    """Return the seconds of each part as torch's profiler sees them, and in total."""
    seconds: Seconds = dict.fromkeys(PARTS[:-1], 0.0)
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with ExitStack() as patches:
        if not cuda:
            patches.enter_context(patch.object(Kernel, "__call__", _recorded(Kernel.__call__)))
        profiler = patches.enter_context(torch.profiler.profile(activities=activities))
        took = timed(work, device)
    for event in profiler.events():
        if cuda and event.device_type == DeviceType.CUDA:
            seconds[_of_gpu_kernel(event.name)] += event.time_range.elapsed_us() / 1e6
        elif not cuda and event.cpu_parent is None:
            _add(event, None, seconds)
    return seconds, took


def _parts_of_kernels() -> dict[int, str]:
    """Return the parts of kernels by address; all others belong to "other"."""
    products = {kernel.address: "products" for kernel in [product_kernel(), experts_kernel()]}
    kernels = [kernel for dtype in (torch.bfloat16, torch.float32) for kernel in attention_kernels(dtype, False)]
    return products | {kernel.address: "attention" for kernel in kernels}


def _recorded(call: Callable[..., None]) -> Callable[..., None]:
    """Make calls of our own kernels in a stock forward visible to torch's profiler."""
    parts = _parts_of_kernels()

    def watched(kernel: Kernel, *args: Any) -> None:
        with record_function(f"talon::{parts.get(kernel.address, 'other')}"):
            call(kernel, *args)

    return watched


def _add(event: Any, part: str | None, seconds: Seconds) -> None:
    """Add an operation's own time, and that of the operations it calls, to its part."""
    part = part or _of_operation(event.name)
    seconds[part or "other"] += event.self_cpu_time_total / 1e6
    for called in event.cpu_children:
        _add(called, part, seconds)


def _of_operation(name: str) -> str | None:
    """Return the part of an operation and all it calls; None where the operations it calls decide."""
    if "attention" in name:
        return "attention"
    return "products" if name.rpartition("::")[2] in _PRODUCTS else None


def _of_gpu_kernel(name: str) -> str:
    name = name.lower()
    if any(word in name for word in ("attention", "attend", "flash", "fmha")):
        return "attention"
    return "products" if any(word in name for word in _GPU_PRODUCTS) else "other"

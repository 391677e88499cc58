"""A device without memory, on which work is counted: kernels, bytes to and from the host, and waits of the host.

Its tensors have shapes, types and a device, but no values, so a model of any size fits. What the host reads is
invented: numbers that fall along a row, as sorted probabilities do, or that rise, as different tokens do. Work that a
CUDA graph would capture is traced once, and may not wait for the host; operands on two devices are an error, as on a
GPU. A process that imports this has one device more, for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from engine.model.cuda import graphs

_NAME = "traced"
_setup_privateuseone_for_python_backend(_NAME)
DEVICE = torch.device(f"{_NAME}:0")
_aten = torch.ops.aten
_NO_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh", "set_"}
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.linear.default}


@dataclass
class Counts:
    """What was done on the device.

    launches: of kernels, one by one. replays: of graphs; graph_kernels: in these. waits: of the host for the device, to
    read a result, or until it has taken what it was sent. up, down: bytes to the device and back. weights: bytes of
    matrices that products read; flops: of products. names: kernels by name, those in graphs too.
    """

    launches: int = 0
    replays: int = 0
    graph_kernels: int = 0
    waits: int = 0
    up: int = 0
    down: int = 0
    weights: int = 0
    flops: int = 0
    names: dict[str, int] = field(default_factory=dict)

    def add(self, name: str) -> None:
        self.launches += 1
        self.names[name] = self.names.get(name, 0) + 1

    def replay(self, graph: Counts) -> None:
        self.replays += 1
        self.graph_kernels += graph.launches
        self.weights += graph.weights
        self.flops += graph.flops
        for name, count in graph.names.items():
            self.names[name] = self.names.get(name, 0) + count


class TracedTensor(Tensor):  # type: ignore[misc]
    """A tensor of the device without memory. held: the same without a device of its own, on "meta"."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> TracedTensor:
        made: TracedTensor = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of `Tracing`")

    def tolist(self) -> Any:
        return self.cpu().tolist()


class Tracing(TorchDispatchMode):  # type: ignore[misc]
    """Counts what is done on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.capturing = False
        self.sent = self._arrived = 0  # downloads

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Count what is done within, and nothing else."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    def wait(self, why: object) -> None:
        if self.capturing:
            raise RuntimeError(f"{why} waits for the host, which a graph cannot capture")
        self.counts.waits += 1
        self._arrived = self.sent

    def has_arrived(self, download: int) -> bool:
        """Return whether the download of that number was sent before something that has been waited for."""
        return download <= self._arrived

    def read(self, download: int) -> None:
        """Wait for a download, unless it has arrived."""
        if not self.has_arrived(download):
            self.wait("a download")
            self._arrived = download

    def captured(self, work: graphs.Work, inputs: Sequence[Tensor], device: torch.device, memory: object) -> Any:
        """Stand for `engine.model.cuda.graphs._captured`."""
        with self.counting() as counts:
            self.capturing = True
            try:
                outputs = work(*inputs)
            finally:
                self.capturing = False
        return _Graph(self, counts), outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        asked = kwargs.get("device")
        there = any(isinstance(leaf, TracedTensor) for leaf in leaves)
        if not there and (asked is None or torch.device(asked).type != _NAME):
            return func(*args, **kwargs)
        if func not in _PRODUCTS and func is not _aten.detach.default:
            with self:
                if (made := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return made
        if func in _COPIES:
            return self._copy(func, args, kwargs)
        if func is _aten._local_scalar_dense.default:
            self.wait(func)
            self.counts.down += args[0].itemsize
            return invented(args[0].held).item()
        if func is _aten.equal.default:
            self.wait(func)
            return False
        if func is _aten.nonzero.default:
            self.wait(func)
            return TracedTensor(torch.empty(1, args[0].dim(), dtype=torch.int64, device="meta"))
        return self._run(func, args, kwargs, leaves)

    def _run(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        of_host = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, TracedTensor)]
        for leaf in of_host:
            if leaf.dim() == 0:
                continue  # a number is no tensor
            if func not in _INDEXED:
                raise RuntimeError(f"{func}: operands on two devices")
            self.wait(f"{func} with an index on the host")
            self.counts.up += leaf.nbytes
        known = {id(leaf.held): leaf for leaf in leaves if isinstance(leaf, TracedTensor)}
        given, named = tree_map(_held, (args, kwargs))
        if "device" in named:
            named["device"] = torch.device("meta")
        if func in _INDEXED and any(index is not None and index.dtype == torch.bool for index in tree_leaves(given[1])):
            raise RuntimeError(f"{func}: the shape depends on values")
        out = func(*given, **named)
        self._note(func, given)
        return tree_map(lambda part: known[id(part)] if id(part) in known else _traced(part), out)

    def _note(self, func: Any, given: Any) -> None:
        returns = func._schema.returns
        is_view = bool(returns) and all(one.alias_info and not one.alias_info.is_write for one in returns)
        name = func.__name__.partition(".")[0]
        if is_view or name in _NO_KERNEL:
            return
        self.counts.add(name)
        if func in _PRODUCTS:
            x, weight = [part for part in given if isinstance(part, Tensor) and part.dim() > 1][-2:]
            self.counts.weights += weight.nbytes
            self.counts.flops += 2 * x.shape[:-1].numel() * weight.numel()

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _aten._to_copy.default:
            source, device = args[0], torch.device(kwargs.get("device") or args[0].device)
            dtype = kwargs.get("dtype") or source.dtype
            to_host, of_host = device.type == "cpu", source.device.type == "cpu"
            soon, result = bool(kwargs.get("non_blocking")), torch.empty(source.shape, dtype=dtype, device="meta")
        else:
            result, source, soon = args[0], args[1], bool(args[2:] and args[2])
            to_host, of_host = result.device.type == "cpu", source.device.type == "cpu"
        if to_host:
            if not soon:
                self.wait(func)
            self.counts.down += source.nbytes
            found = invented(source.held).to(result.dtype)
            return found if func is _aten._to_copy.default else result.copy_(found)
        if of_host and source.numel():
            self.counts.up += source.nbytes
            if not soon:
                self.wait(func)
        elif source.device.type != "meta":
            self.counts.add("copy")
        return result if isinstance(result, TracedTensor) else TracedTensor(result)


class _Graph:
    """Stands for a CUDA graph."""

    def __init__(self, tracing: Tracing, counts: Counts):
        self._tracing, self._counts = tracing, counts

    def replay(self) -> None:
        self._tracing.counts.replay(self._counts)


class Launched:
    """A Triton kernel whose launches are counted."""

    def __init__(self, name: str, tracing: Tracing):
        self._name, self._tracing = name, tracing

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **named: self._tracing.counts.add(self._name)


def on_device(of: Tensor) -> TracedTensor:
    """Return a tensor of that shape and type on the device."""
    return TracedTensor(torch.empty_like(of, device="meta"))


def invented(of: Tensor) -> Tensor:
    """Return [...] as the host would read it."""
    width = of.shape[-1] if of.dim() else 1
    row = torch.arange(width)
    if of.dtype == torch.bool:
        row = torch.ones(width, dtype=torch.bool)
    elif of.is_floating_point():
        row = 0.5 ** (1 + row).clamp(max=60).double()
    return row.to(of.dtype).expand(math.prod(of.shape[:-1]), width).clone().view(of.shape)


def _held(part: Any) -> Any:
    if isinstance(part, TracedTensor):
        return part.held
    return part.to("meta") if isinstance(part, Tensor) and part.dim() else part


def _traced(part: Any) -> Any:
    return TracedTensor(part) if isinstance(part, Tensor) else part

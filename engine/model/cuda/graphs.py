"""Work of fixed shapes, captured once as a CUDA graph and replayed from then on.

A GPU computes a small forward faster than its host can launch it kernel by kernel; a graph is one launch. Captured
tensors must not change in shape or address, so rows are padded to a bucket's size and texts live in caches of fixed
size. On a CPU the same work is called directly each time, which is what the tests exercise.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.errors import first_line
from engine.device import pack_inputs, upload, uploaded

Work = Callable[..., tuple[Tensor, ...]]
Memory = tuple[int, int]
Buffers = TypeVar("Buffers")
_ROUND, _SPARE = 256, 32  # buffer lengths are multiples of the first; so many spare buffers are kept
_WARM_UPS = 3  # calls before capture
_GRAPHS = ("cuda",)  # devices whose work can be captured
_CAPTURING = threading.Lock()  # torch captures one graph at a time in a process


def shared_memory(device: torch.device) -> Memory | None:
    """Return memory that graphs may share."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def bucket(rows: int) -> int:
    """Return the row count of the graph that serves `rows` rows: the next power of two."""
    return 1 << (rows - 1).bit_length()


class CaptureOwner:
    """Whose work is captured, a target or a drafter: after a capture that CUDA invalidated, none of its own is tried,
    and those of others are.
    """

    captures = True


class Recorded:
    """`work` over tensors that have the same shapes in every call. memory: what graphs may share that never run at once
    and whose outputs are read before another of them runs (`shared_memory`). owner: whose work it is; None: its own.
    room: numbers that the last input has room for, if it may be of any length up to that; only what is given is sent.

    captures: whether all captures of this process were valid so far. stuck: whether one could not be ended, after which
    none is tried, since torch's allocator still counts it as under way. A capture that only ran out of memory ends
    properly: that work alone is called directly, and the next, perhaps smaller one is tried. told: whether exhausted
    memory was reported.
    """

    captures = True
    stuck = False
    told = False

    def __init__(
        self,
        work: Work,
        device: torch.device,
        memory: Memory | None = None,
        owner: CaptureOwner | None = None,
        room: int | None = None,
    ):
        self._work, self._device, self._memory, self._owner = work, device, memory, owner or CaptureOwner()
        self._room = room
        self._inputs: tuple[Tensor, ...] | None = None
        self._upload: Tensor | None = None  # the memory that the inputs from the host are views of
        self._outputs: tuple[Tensor, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor, late: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the results of `work`; the next call overwrites them. inputs: on any device. late: numbers on the
        device, found by what was launched before, in the place of as many first ones of the first input.
        """
        if self._inputs is None:
            if self._room is not None:
                inputs = *inputs[:-1], F.pad(inputs[-1], (0, self._room - len(inputs[-1])))
            memory, held = upload(inputs, self._device)
            if self._device.type in _GRAPHS:
                self._capture(held)
            self._upload, self._inputs = memory, held
        else:
            self._renew(inputs)
        if late is not None:
            self._inputs[0][: len(late)].copy_(late)
        if self._graph is None:
            return self._work(*self._inputs)
        self._graph.replay()
        return self._outputs

    def _renew(self, inputs: Sequence[Tensor]) -> None:
        """Copy new inputs to the memory that the captured work reads."""
        assert self._inputs is not None
        if self._upload is not None:
            packed = pack_inputs(inputs, self._device)
            self._upload[: len(packed)].copy_(packed, non_blocking=True)
        for kept, given in zip(self._inputs, inputs, strict=True):
            if given.device.type != "cpu" or self._upload is None:
                kept[: len(given)].copy_(given)

    def _capture(self, inputs: Sequence[Tensor]) -> None:
        """Capture the work. Where that fails, say so once: some models synchronise with the host, which a graph cannot
        hold.
        """
        with _CAPTURING:
            if Recorded.stuck or not self._owner.captures:
                return
            _warm_up(self._work, inputs, self._device)
            try:
                self._graph, self._outputs = _captured(self._work, inputs, self._device, self._memory)
            except torch.OutOfMemoryError as error:
                if not Recorded.told:
                    Recorded.told = True
                    print(f"talon: no memory for a forward's CUDA graph: {first_line(error)}", file=sys.stderr)
            except RuntimeError as error:
                Recorded.captures = self._owner.captures = False
                print(f"talon: forwards are not captured as CUDA graphs: {first_line(error)}", file=sys.stderr)


class RecordedRows:
    """`work` over rows, captured for a few numbers of rows: fewer are padded with zeros. More than `sizes[-1]` rows are
    not captured.
    """

    def __init__(self, work: Work, device: torch.device, sizes: Sequence[int]):
        self._work, self._device, self._sizes, self._owner = work, device, sizes, CaptureOwner()
        self._recorded: dict[tuple[int, tuple[str, ...]], Recorded] = {}  # by rows, and where the inputs come from

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the results of `work` for these rows, [rows, ...]; the next call overwrites them.
        inputs: [rows, ...].
        """
        rows = len(inputs[0])
        size = next((size for size in self._sizes if size >= rows), None)
        if self._device.type == "cpu" or size is None:
            return self._work(*uploaded(inputs, self._device))
        key = size, tuple(given.device.type for given in inputs)
        if key not in self._recorded:
            self._recorded[key] = Recorded(self._work, self._device, owner=self._owner)
        padded = (given.new_zeros(size, *given.shape[1:]) for given in inputs)
        filled = [torch.cat([given, rest[rows:]]) for given, rest in zip(inputs, padded, strict=True)]
        return tuple(out[:rows] for out in self._recorded[key](*filled))


@cache
def _aside(device: torch.device, priority: int) -> torch.cuda.Stream:
    """Return the stream that captures are made on: one for each priority, which a graph's kernels keep when it is
    replayed.
    """
    return torch.cuda.Stream(device, priority=priority)


def _warm_up(work: Work, inputs: Sequence[Tensor], device: torch.device) -> None:
    """Let libraries do their one-time setup, on the stream that will be captured."""
    here = torch.cuda.current_stream(device)
    aside = _aside(device, here.priority)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UPS):
            work(*inputs)
    here.wait_stream(aside)


def _captured(
    work: Work, inputs: Sequence[Tensor], device: torch.device, memory: Memory | None
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """Return the graph of the work, and the tensors that it writes its results to."""
    here, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
    memory = memory or torch.cuda.graph_pool_handle()
    try:
        # this thread only: over inproc the other worker keeps running
        with torch.cuda.graph(
            graph, pool=memory, stream=_aside(device, here.priority), capture_error_mode="thread_local"
        ):
            outputs = work(*inputs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        Recorded.stuck = Recorded.stuck or not _ended(device, memory)
        raise
    finally:
        torch.cuda.set_stream(here)  # after a failure torch stays on the stream that it captured
    return graph, outputs


def _ended(device: torch.device, memory: Memory) -> bool:
    """End an invalidated capture for torch's allocator, which torch leaves out; returns whether that was possible."""
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        torch._C._cuda_endAllocateToPool(index, memory)
        torch._C._cuda_releasePool(index, memory)
    except (AttributeError, RuntimeError):
        return False
    return True


def release_memory() -> None:
    """Return a GPU's memory that ended workers held: graphs and forwards refer to each other, and torch keeps what is
    freed.
    """
    if torch.cuda.is_initialized():
        with _CAPTURING:
            gc.collect()
            torch.cuda.empty_cache()


def rounded(length: int) -> int:
    """Return the buffer length for a text of at most `length` positions: few different lengths, so that buffers are
    reused.
    """
    return -(-length // _ROUND) * _ROUND


class Spare(Generic[Buffers]):
    """Buffers of finished requests: graphs captured over them serve another request of the same size."""

    def __init__(self) -> None:
        self._waiting: list[tuple[object, Buffers]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, size: object) -> Buffers | None:
        """Return buffers of that size, if there are any."""
        found = next((entry for entry in self._waiting if entry[0] == size), None)
        if found is None:
            return None
        self._waiting.remove(found)
        return found[1]

    def give(self, size: object, buffers: Buffers) -> None:
        """Return buffers to the pool; evict the oldest."""
        if all(buffers is not other for _, other in self._waiting):
            self._waiting = [*self._waiting, (size, buffers)][-_SPARE:]

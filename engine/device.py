"""A model's device: numbers on their way to it and back, its streams, and the wait for its work.

Copies between a host and a GPU are few and large, since each costs as much as a small kernel. A CPU copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import itemgetter

import torch
from torch import Tensor


def uploaded(inputs: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Return the inputs on the device: those from the host in one copy, which nobody waits for; others as they are."""
    if device.type == "cpu":
        return tuple(inputs)
    sent = iter(upload([given for given in inputs if given.device.type == "cpu"], device)[1])
    return tuple(next(sent) if given.device.type == "cpu" else given for given in inputs)


def downloaded(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the results on the host, in one copy: each copy waits for the device."""
    if all(one.device.type == "cpu" for one in results):
        return tuple(results)
    packed, order = _in_one_piece(results)
    return _taken_apart(packed.cpu(), results, order)


class Download:
    """Results on their way to the host, once what was launched is done. Nobody waits until they are read."""

    def __init__(self, results: Sequence[Tensor]):
        self._held = [_on_its_way(one) for one in results]
        self._event: torch.cuda.Event | None = None
        self._waits = any(one.device.type == "cuda" for one in results)
        if self._waits:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether `read` waits for nothing."""
        return not self._waits or self._event is None or bool(self._event.query())

    def read(self) -> list[Tensor]:
        """Return the results on the host."""
        if self._waits and self._event is not None:
            self._event.synchronize()
            self._waits = False
        return self._held

    def seconds_after(self, other: Download) -> float:
        """Return how much later than another one it was there, once both are; 0 on a CPU."""
        if self._event is None or other._event is None:
            return 0.0
        milliseconds: float = other._event.elapsed_time(self._event)
        return milliseconds / 1000


class PackedDownload(Download):
    """Many small results on their way to the host, in one copy."""

    def __init__(self, results: Sequence[Tensor]):
        self._results, self._order = results, list[int]()
        if results[0].device.type != "cpu":
            packed, self._order = _in_one_piece(results)
            results = [packed]
        super().__init__(results)

    def read(self) -> list[Tensor]:
        held = super().read()
        return [*_taken_apart(held[0], self._results, self._order)] if self._order else held


def _on_its_way(result: Tensor) -> Tensor:
    """Return the result on the host, or the pinned memory to which the device copies it."""
    if result.device.type == "cpu":
        return result
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=result.device.type == "cuda")
    return host.copy_(result, non_blocking=True) if result.numel() else host


def _in_one_piece(results: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return the bytes of all results, and the order of these, in which each one begins at a multiple of its size."""
    order = sorted(range(len(results)), key=lambda i: -results[i].itemsize)
    return torch.cat([results[i].contiguous().flatten().view(torch.uint8) for i in order]), order


def _taken_apart(packed: Tensor, results: Sequence[Tensor], order: Sequence[int]) -> tuple[Tensor, ...]:
    parts = zip(order, _split_up(packed, [results[i] for i in order]), strict=True)
    return tuple(part for _, part in sorted(parts, key=itemgetter(0)))


def _split_up(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [one.nbytes for one in like]
    return [part.view(one.dtype).view(one.shape) for part, one in zip(packed.split(sizes), like, strict=True)]


def upload(inputs: Sequence[Tensor], device: torch.device) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Return the memory on the device that the inputs from the host are views of, and all inputs there."""
    if device.type == "cpu":
        return None, tuple(given.clone() for given in inputs)
    memory = pack_inputs(inputs, device).to(device, non_blocking=True)
    parts = iter(_parts(memory, [given for given in inputs if given.device.type == "cpu"]))
    return memory, tuple(next(parts) if given.device.type == "cpu" else given.clone() for given in inputs)


def pack_inputs(inputs: Sequence[Tensor], device: torch.device) -> Tensor:
    """Pack the inputs from the host, one after the other, in pinned memory, which torch keeps until it is copied."""
    of_host = [given for given in inputs if given.device.type == "cpu"]
    total = sum(_padded_bytes(given) for given in of_host)
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, given in zip(_parts(packed, of_host), of_host, strict=True):
        part.copy_(given)
    return packed


def _parts(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    starts = accumulate(map(_padded_bytes, like), initial=0)
    return [
        packed[start : start + one.nbytes].view(one.dtype).view(one.shape)
        for start, one in zip(starts, like, strict=False)
    ]


def _padded_bytes(part: Tensor) -> int:
    """Round up to a multiple of 16, the addresses that kernels are compiled for."""
    padded: int = -(-part.nbytes // 16) * 16
    return padded


def wait(device: torch.device) -> None:
    """Wait until this thread's work is done: GPU launches are asynchronous and say nothing of the time it takes."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@contextmanager
def own_stream(device: torch.device, urgent: bool) -> Iterator[None]:
    """On a GPU, run this thread's work in a stream of its own, so that it overlaps with the other worker's. It begins
    when what was launched before, such as a model's loading, is done. urgent: it goes first where both have work: a
    draft step is short, and a verification waits for it.
    """
    if device.type != "cuda":
        yield
        return
    own = torch.cuda.Stream(device, priority=-1 if urgent else 0)
    own.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(own):
        yield

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
    order = sorted(range(len(results)), key=lambda i: -results[i].itemsize)  # so that each one begins at its multiple
    like = [results[i] for i in order]
    parts = _split_up(torch.cat([one.contiguous().flatten().view(torch.uint8) for one in like]).cpu(), like)
    return tuple(part for _, part in sorted(zip(order, parts, strict=True), key=itemgetter(0)))


class Download:
    """Results on their way to the host, once what was launched is done. Nobody waits until they are read."""

    def __init__(self, results: Sequence[Tensor]):
        self._held = [_on_its_way(one) for one in results]
        self._event: torch.cuda.Event | None = None
        if any(one.device.type == "cuda" for one in results):
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether `read` waits for nothing."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[Tensor]:
        """Return the results on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._held


def _on_its_way(result: Tensor) -> Tensor:
    """Return the result on the host, or the pinned memory to which the device copies it."""
    if result.device.type == "cpu":
        return result
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=result.device.type == "cuda")
    return host.copy_(result, non_blocking=True) if result.numel() else host


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

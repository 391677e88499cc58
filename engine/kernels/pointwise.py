"""Finds which pointwise operations give other bits at the end of an array than within it, on this machine.

torch computes most of an array in vectors and the rest one number at a time, and some functions (SiLU in float32, GELU
by tanh) do not give the same bits both ways. A row's place in that array depends on the number of rows before it, so
such a function is exact only if every row is whole vectors, for every share of the work that a thread may get.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_VECTOR = 64  # numbers that the loops of torch take at once, at most


class PointwiseOperations(TorchDispatchMode):
    """Records, while active, the operations on one array of floats and the length of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[Any, tuple[Any, ...], tuple[Any, ...], torch.dtype, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.pointwise in func.tags and _is_floats(args[0]) and not any(map(_is_tensor, args[1:])):
            width = args[0].shape[-1] if args[0].dim() else 1
            self._seen.add((func, args[1:], tuple(kwargs.items()), args[0].dtype, width))
        return func(*args, **kwargs)

    def depending_on_place(self, threads: int) -> str | None:
        """Return the first operation whose bits may depend on the other rows; None if there is none."""
        for func, args, kwargs, dtype, width in sorted(self._seen, key=str):
            whole = all(width % (_VECTOR * shares) == 0 for shares in range(1, threads + 1))
            if not whole and not _same_everywhere(func, args, kwargs, dtype):
                return f"{str(func).split('.')[1]} over rows of {width}"
        return None


@cache
def _same_everywhere(func: Any, args: tuple[Any, ...], kwargs: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """Return whether the bits are the same in vectors and one number at a time: for all bfloat16 numbers, or many
    others.
    """
    if dtype == torch.bfloat16:
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    else:
        x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype) * 4
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        within = func(x.clone(), *args, **dict(kwargs))
        at_ends = torch.cat([func(part.clone(), *args, **dict(kwargs)) for part in x.split(_VECTOR // 4 - 1)])
    finally:
        torch.set_num_threads(threads)
    return bool(((within == at_ends) | (within.isnan() & at_ends.isnan())).all())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()

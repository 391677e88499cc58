"""Memory in pages of 2 MB, where Linux has them, for matrices that every forward reads.

A forward over pages of 4 kB waits for tens of thousands of addresses to be looked up. numpy asks Linux for large pages
where an array has 4 MB or more, so matrices are put beside one another in such arrays.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

_PAGE, _LINE = 2 << 20, 64  # bytes
_ARRAY = 32 << 20  # bytes; a page of it takes memory when it is first written
_OWN = 4 << 20  # bytes of a matrix that has an array of its own, which goes when it goes


class _Array:
    """The array that small matrices are put into, one behind the other; it goes when the last of them does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """So many bytes, which begin with a cache line."""
        if size >= _OWN:
            return _bytes(size)
        with self._lock:
            if size > self._rest.numel():
                self._rest = _bytes(_ARRAY)
            taken, self._rest = self._rest[:size], self._rest[-(-size // _LINE) * _LINE :]
        return taken


def _bytes(size: int) -> Tensor:
    """So many, which begin with a page."""
    whole = np.empty(size + _PAGE, np.uint8)
    start = -whole.ctypes.data % _PAGE
    return torch.from_numpy(whole[start : start + size])


_array = _Array()


def in_large_pages(matrix: Tensor) -> Tensor:
    """A copy that lies there."""
    place = _array.take(matrix.nbytes).view(matrix.dtype).view(matrix.shape)
    return place.copy_(matrix)

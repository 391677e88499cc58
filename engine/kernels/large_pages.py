"""Memory in pages of 2 MB, where Linux has them, for matrices that every forward reads.

A forward over pages of 4 kB waits for tens of thousands of address translations. numpy asks Linux for large pages for
arrays of 4 MB or more, so matrices are packed into such arrays.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

_PAGE, _LINE = 2 << 20, 64  # bytes
_ARRAY = 32 << 20  # bytes; a page of it takes memory when it is first written
_OWN = 4 << 20  # a matrix of so many bytes has its own array, freed with it


class _Array:
    """The array that small matrices are packed into, one after the other; it is freed with the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Take `size` bytes, aligned to a cache line."""
        if size >= _OWN:
            return _bytes(size)
        with self._lock:
            if size > self._rest.numel():
                self._rest = _bytes(_ARRAY)
            taken, self._rest = self._rest[:size], self._rest[-(-size // _LINE) * _LINE :]
        return taken


def _bytes(size: int) -> Tensor:
    """Return `size` bytes, aligned to a page."""
    whole = np.empty(size + _PAGE, np.uint8)
    start = -whole.ctypes.data % _PAGE
    return torch.from_numpy(whole[start : start + size])


_array = _Array()


def large_pages(size: int) -> Tensor:
    """Return [size] uint8 in large pages, aligned to a cache line."""
    return _array.take(size)


def in_large_pages(matrix: Tensor) -> Tensor:
    """Return a copy of the matrix in large pages."""
    place = large_pages(matrix.nbytes).view(matrix.dtype).view(matrix.shape)
    return place.copy_(matrix)

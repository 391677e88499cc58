"""Matrices beside one another in large arrays."""

from __future__ import annotations

import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.large_pages import in_large_pages

MEGABYTE = 1 << 20


@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.sampled_from([torch.uint8, torch.bfloat16]))
def test_matrices_keep_their_numbers_beside_others(sizes: list[int], dtype: torch.dtype) -> None:
    matrices = [torch.randint(0, 100, (size, 3)).to(dtype) for size in sizes]
    placed = [in_large_pages(matrix) for matrix in matrices]
    for matrix, copy in zip(matrices, placed, strict=True):
        assert torch.equal(matrix, copy) and copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0, "a cache line"


def test_matrices_laid_out_another_way_become_contiguous() -> None:
    matrix = torch.arange(12).view(3, 4).t()
    placed = in_large_pages(matrix)
    assert placed.is_contiguous() and torch.equal(placed, matrix)


def test_small_matrices_are_neighbours() -> None:
    in_large_pages(torch.ones(3 * MEGABYTE, dtype=torch.uint8))
    first, second = (in_large_pages(torch.ones(1000, dtype=torch.uint8)) for _ in range(2))
    assert second.data_ptr() - first.data_ptr() == 1024


_TAKE_AND_LEAVE = """
import psutil, torch
from engine.kernels.large_pages import in_large_pages
megabytes = lambda: psutil.Process().memory_info().rss >> 20
small = in_large_pages(torch.ones(1000, dtype=torch.uint8))
before = megabytes()
large = in_large_pages(torch.ones(200 << 20, dtype=torch.uint8))
beside = in_large_pages(small)
with_it = megabytes() - before
del large
print(with_it, megabytes() - before, int(beside.sum()))
"""


def test_the_memory_of_a_large_matrix_goes_with_it() -> None:
    """In a process of its own: threads of other tests take memory as well."""
    told = subprocess.run([sys.executable, "-c", _TAKE_AND_LEAVE], capture_output=True, text=True, check=True).stdout
    with_it, without, kept = map(int, told.split())
    assert with_it >= 190 and without < 50 and kept == 1000

"""How the threads share the panels of a product, for more threads than a machine at hand may have."""

from __future__ import annotations

import pytest

from engine.kernels.gemm.matmul_kernels import share_of

THREADS = (1, 2, 3, 4, 8, 16, 24, 32, 48, 64)
PRODUCTS = {
    "queries and keys in one layout, values in another, of 1.5 B parameters": [112, 16],
    "queries and keys in one layout, values in another, of 0.5 B parameters": [64, 8],
    "a gate and an up projection": [560],
    "three layouts": [5, 7, 96],
    "fewer panels than threads": [1, 2, 1],
}
of_a_product = pytest.mark.parametrize("parts", PRODUCTS.values(), ids=PRODUCTS)


def shares(parts: list[int], thread: int, threads: int) -> list[tuple[int, int]]:
    """A thread's share of each part."""
    return [share_of(units, sum(parts[:i]), thread, threads) for i, units in enumerate(parts)]


@of_a_product
@pytest.mark.parametrize("threads", THREADS)
def test_every_panel_of_a_part_is_multiplied_once(parts: list[int], threads: int) -> None:
    for i, units in enumerate(parts):
        taken = [range(*shares(parts, thread, threads)[i]) for thread in range(threads)]
        assert [panel for some in taken for panel in some] == list(range(units))


@of_a_product
@pytest.mark.parametrize("threads", THREADS)
def test_no_thread_multiplies_more_panels_than_it_must(parts: list[int], threads: int) -> None:
    counts = [sum(end - begin for begin, end in shares(parts, thread, threads)) for thread in range(threads)]
    assert max(counts) == -(-sum(parts) // threads)

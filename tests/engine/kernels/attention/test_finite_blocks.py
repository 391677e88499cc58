from __future__ import annotations

import pytest
import torch

from engine.core.kv_shape import KVShape
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.model.kv_part import finite_by_index
from engine.model.kv_pool import KVPool
from tests.engine.kernels.pool_layout import fill

BLOCKS = 5
KINDS = [(torch.float32, ""), (torch.bfloat16, ""), (torch.bfloat16, "vnni"), (torch.bfloat16, "q8_0")]


@pytest.fixture(params=KINDS, ids=str)
def shape(request: pytest.FixtureRequest) -> KVShape:
    dtype, layout = request.param
    if layout == "q8_0" and not instruction_sets():
        pytest.skip("this processor has no integer products that we know")
    return KVShape(3, 2, 80, dtype, layout == "vnni", layout == "q8_0")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", [0, 1])
def test_one_number_that_is_not_finite_is_found_wherever_it_lies(part: int, number: float, shape: KVShape) -> None:
    pool, generator = KVPool(shape, BLOCKS), torch.Generator().manual_seed(0)
    size = (3, BLOCKS, 2, 16, shape.dims)
    clean = [(torch.randn(size, generator=generator) * 1000).to(shape.dtype) for _ in range(2)]
    for layer, block, head, lane, dim in ((0, 0, 0, 0, 0), (2, 4, 1, 15, 79), (1, 2, 0, 7, 33), (2, 1, 1, 8, 64)):
        both = [one.clone() for one in clean]
        both[part][layer, block, head, lane, dim] = number
        fill(pool, *both)
        asked = [3, block, (block + 1) % BLOCKS]
        assert pool.finite(asked) == [one != block for one in asked]
        if not shape.q8_0:
            assert finite_by_index(pool.keys, pool.values, asked) == pool.finite(asked)


def test_the_largest_and_the_smallest_numbers_are_finite(shape: KVShape) -> None:
    pool, most = KVPool(shape, 2), 8e6 if shape.q8_0 else torch.finfo(shape.dtype).max
    for number in (most, -most, torch.finfo(shape.dtype).tiny, 0.0):
        numbers = torch.full((3, 2, 2, 16, shape.dims), number, dtype=shape.dtype)
        fill(pool, numbers, numbers)
        assert pool.finite([1, 0]) == [True, True] and pool.finite([]) == []

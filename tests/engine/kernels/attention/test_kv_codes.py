"""Keys and values that a layer writes in codes of 8 bits, against the rule of q8_0 in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.core.batch import BLOCK_SIZE
from engine.core.kv_shape import KVShape
from engine.kernels.attention.enter import ENTER
from engine.kernels.attention.kv_codes import enter_codes_kernel
from engine.kernels.gemm.int8.dots import instruction_sets
from engine.kernels.threads import address_of
from engine.model.kv_pool import KVPool
from tests.engine.kernels.pool_layout import contents, in_codes, padded

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="this processor has no integer products that we know")
BLOCKS, HEADS, GROUPS = 3, 2, 2


def entered(pool: KVPool, qkv: Tensor, slots: list[int]) -> Tensor:
    """Write the keys and values of [rows, (groups + 2) * heads * head_dim]; returns the queries."""
    shape, work, rows = pool.shape, np.zeros(1, ENTER), len(qkv)
    work["stride"] = qkv.stride(0) * qkv.itemsize
    places, angles = np.array(slots, np.int32), np.zeros(rows, np.int32)
    queries = torch.zeros(HEADS, rows, GROUPS, shape.dims, dtype=torch.bfloat16 if shape.vnni else torch.float32)
    scratch = torch.full((torch.get_num_threads(), shape.dims), torch.nan)
    record = work[0]
    record["positions"], record["slots"], record["rows"] = angles.ctypes.data, places.ctypes.data, rows
    record["queries"], record["scratch"], record["qkv"] = queries.data_ptr(), scratch.data_ptr(), qkv.data_ptr()
    record["keys"], record["values"] = pool.addresses(0)
    record["kv_heads"], record["q_per_kv"], record["head_dim"] = HEADS, GROUPS, shape.head_dim
    record["dims"], record["width"], record["vnni"] = shape.dims, qkv.itemsize, shape.vnni
    enter_codes_kernel()(address_of(work), rows)
    return queries


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([8, 24, 32, 64, 80, 128]),
    st.sampled_from([(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)]),
    st.lists(st.integers(0, BLOCKS * BLOCK_SIZE - 1), min_size=1, max_size=20, unique=True),
    st.integers(0, 1 << 30),
    st.sampled_from([0.0, 1e-6, 1.0, 300.0]),
)
def test_what_is_written_is_read_as_the_rule_rounds_it(
    head_dim: int, kind: tuple[torch.dtype, bool], slots: list[int], seed: int, size: float
) -> None:
    dtype, vnni = kind
    shape = KVShape(1, HEADS, head_dim, dtype, vnni, q8_0=True)
    pool, generator = KVPool(shape, BLOCKS), torch.Generator().manual_seed(seed)
    qkv = (torch.randn(len(slots), (GROUPS + 2) * HEADS, head_dim, generator=generator) * size).to(dtype)
    queries = entered(pool, qkv.flatten(1).contiguous(), slots)
    asked, given_keys, given_values = qkv.split([GROUPS * HEADS, HEADS, HEADS], dim=1)
    assert torch.equal(queries.float(), padded(asked.float(), shape).unflatten(1, (HEADS, GROUPS)).transpose(0, 1))
    for found, of in zip(contents(pool), (given_keys, given_values), strict=True):
        expected = in_codes(padded(of.float(), shape))
        for row, slot in enumerate(slots):
            assert torch.equal(found[0, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE], expected[row])
        assert (expected[..., :head_dim] - of.float()).abs().max() <= of.float().abs().max() / 230 + 4e-6


def test_an_infinity_or_nan_is_not_hidden() -> None:
    pool = KVPool(KVShape(1, HEADS, 64, torch.float32, q8_0=True), 1)
    qkv = torch.ones(2, (GROUPS + 2) * HEADS * 64)
    qkv[0, GROUPS * HEADS * 64], qkv[1, -1] = torch.inf, torch.nan
    entered(pool, qkv, [3, 4])
    keys, values = contents(pool)
    assert not keys[0, 0, 0, 3, :32].isfinite().any() and keys[0, 0, 0, 3, 32:].isfinite().all()
    assert values[0, 0, 1, 4, 32:].isnan().all() and values[0, 0, 1, 4, :32].isfinite().all()


def test_a_block_takes_34_bytes_for_32_numbers() -> None:
    shape = KVShape(3, 2, 128, torch.bfloat16, q8_0=True)
    pool = KVPool(shape, 5)
    assert pool.keys.nbytes + pool.values.nbytes == 5 * shape.block_bytes
    assert shape.block_bytes == 2 * 3 * 2 * BLOCK_SIZE * 128 * 34 // 32

"""A pool's keys and values as plain arrays [layers, blocks, kv_heads, 16, dims], whatever its layout."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import BLOCK_SIZE
from engine.core.kv_shape import CODE_GROUP, KVShape
from engine.model.kv_pool import KVPool
from tests.engine.kernels.gemm.int8_reference import rounded

_SCALE_BYTES = 2 * BLOCK_SIZE  # bytes of a group of a block


def fill(pool: KVPool, keys: Tensor, values: Tensor) -> None:
    """Fill the pool with both, [layers, blocks, kv_heads, 16, dims]. A pool of codes gets them rounded."""
    if pool.shape.q8_0:
        keys, values = _coded_keys(keys), _coded_values(values)
    elif pool.shape.vnni:
        keys = keys.unflatten(4, (-1, 2)).transpose(3, 4)
        values = values.unflatten(4, (-1, 16)).unflatten(3, (8, 2)).movedim((5, 4), (3, 6))
    else:
        keys = keys.transpose(3, 4)
    pool.keys.view(-1).copy_(keys.reshape(-1))
    pool.values.view(-1).copy_(values.reshape(-1))


def contents(pool: KVPool) -> tuple[Tensor, Tensor]:
    """Return copies of the keys and values."""
    layers, blocks, heads, dims = *pool.keys.shape[:3], pool.shape.dims
    if pool.shape.q8_0:
        return _numbers_of_keys(pool), _numbers_of_values(pool)
    if not pool.shape.vnni:
        return pool.keys.transpose(3, 4).clone(), pool.values.clone()
    keys = pool.keys.view(layers, blocks, heads, dims // 2, 16, 2).transpose(3, 4)
    values = pool.values.view(layers, blocks, heads, dims // 16, 8, 16, 2).movedim((3, 6), (5, 4))
    return keys.flatten(4), values.flatten(5).flatten(3, 4)


def in_codes(x: Tensor) -> Tensor:
    """Return what a pool of codes holds for numbers [..., dims], dims a multiple of 32: float32."""
    codes, scales = _codes(x)
    return (codes.float() * scales.float()[..., None]).flatten(-2)


def padded(x: Tensor, shape: KVShape) -> Tensor:
    """Return [..., head_dim] with zeros up to the shape's dims."""
    return torch.nn.functional.pad(x, (0, shape.dims - x.shape[-1]))


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return [..., groups, 32] int8, and [..., groups] float16."""
    lead = (*x.shape[:-1], x.shape[-1] // CODE_GROUP)
    with np.errstate(invalid="ignore"):
        codes, scales = rounded(x.float().reshape(-1, x.shape[-1]).numpy())
        whole = torch.from_numpy(codes.astype(np.int8))
    return whole.view(*lead, CODE_GROUP), torch.from_numpy(scales).half().view(lead)


def _coded_keys(x: Tensor) -> Tensor:
    """Return [layers, blocks, heads, bytes]."""
    codes, scales = _codes(x)
    words = codes.unflatten(-1, (-1, 4)).movedim(3, 5)  # [..., groups, words, positions, 4]
    unsigned = words.contiguous().view(torch.uint8) ^ 128
    scale_bytes = scales.transpose(3, 4).contiguous().view(torch.uint8)
    return torch.cat([scale_bytes, unsigned.flatten(4)], dim=4).flatten(3)


def _coded_values(x: Tensor) -> Tensor:
    codes, scales = _codes(x)
    scale_bytes = scales.transpose(3, 4).contiguous().view(torch.uint8)
    return torch.cat([codes.flatten(3).view(torch.uint8), scale_bytes.flatten(3)], dim=3)


def _numbers_of_keys(pool: KVPool) -> Tensor:
    tiles = pool.keys.unflatten(3, (pool.shape.dims // CODE_GROUP, -1))
    scales = tiles[..., :_SCALE_BYTES].contiguous().view(torch.float16).float()
    codes = (tiles[..., _SCALE_BYTES:] ^ 128).view(torch.int8).unflatten(4, (-1, BLOCK_SIZE, 4))
    numbers = codes.float() * scales[..., None, :, None]
    return numbers.movedim(5, 3).flatten(4)


def _numbers_of_values(pool: KVPool) -> Tensor:
    dims = pool.shape.dims
    codes = (
        pool.values[..., : BLOCK_SIZE * dims].contiguous().view(torch.int8).unflatten(3, (BLOCK_SIZE, -1, CODE_GROUP))
    )
    scales = pool.values[..., BLOCK_SIZE * dims :].contiguous().view(torch.float16).unflatten(3, (-1, BLOCK_SIZE))
    return (codes.float() * scales.float().transpose(3, 4)[..., None]).flatten(4)

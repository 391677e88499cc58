"""A pool's keys and values as plain arrays [layers, blocks, kv_heads, 16, dims], whatever its layout."""

from __future__ import annotations

from torch import Tensor

from engine.model.kv_pool import KVPool


def fill(pool: KVPool, keys: Tensor, values: Tensor) -> None:
    """Both [layers, blocks, kv_heads, 16, dims]."""
    if pool.shape.vnni:
        keys = keys.unflatten(4, (-1, 2)).transpose(3, 4)
        values = values.unflatten(4, (-1, 16)).unflatten(3, (8, 2)).movedim((5, 4), (3, 6))
    else:
        keys = keys.transpose(3, 4)
    pool.keys.view(-1).copy_(keys.reshape(-1))
    pool.values.view(-1).copy_(values.reshape(-1))


def contents(pool: KVPool) -> tuple[Tensor, Tensor]:
    """Copies of the keys and values."""
    layers, blocks, heads, dims = *pool.keys.shape[:3], pool.shape.dims
    if not pool.shape.vnni:
        return pool.keys.transpose(3, 4).clone(), pool.values.clone()
    keys = pool.keys.view(layers, blocks, heads, dims // 2, 16, 2).transpose(3, 4)
    values = pool.values.view(layers, blocks, heads, dims // 16, 8, 16, 2).movedim((3, 6), (5, 4))
    return keys.flatten(4), values.flatten(5).flatten(3, 4)

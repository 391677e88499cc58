"""The bits of the noise of sampling: a pure function of (seed, position, token id), compiled, without torch.

The splitmix64 finaliser on wrapping 64-bit integers. All sampled texts depend on these bits: they must never change.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine.kernels.jit_cache import versioned
from engine.kernels.subroutine import subroutine

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
UNIT = 2.0**-52


def key_of(seed: int, position: int) -> np.uint64:
    """Return the key that the bits of all tokens at an absolute position share. seed: 64 bits, signed or not."""
    key: np.uint64 = np.uint64(_key(np.uint64(seed % 2**64), position))
    return key


def keys_from(seed: int, position: int, count: int) -> NDArray[np.uint64]:
    """Return `key_of` for `count` positions from `position` on."""
    keys: NDArray[np.uint64] = _keys(np.uint64(seed % 2**64), position, count)
    return keys


@subroutine
def bits_of(key: Any, token: Any) -> Any:
    """Return 52 uniform bits of a token, for kernels."""
    x = np.uint64(token) * np.uint64(GOLDEN) + key
    return _mixed(x) >> np.uint64(12)


@subroutine
def noise_of(key: Any, token: Any) -> Any:
    """Return the standard Gumbel noise of a token, float64, from an odd multiple of 2^-53 below 1, for kernels."""
    return -math.log(-math.log((np.float64(bits_of(key, token)) + 0.5) * UNIT))


@njit(cache=True)
@versioned
def _keys(seed: np.uint64, position: int, count: int) -> NDArray[np.uint64]:
    keys = np.empty(count, np.uint64)
    for i in range(count):
        keys[i] = _key(seed, position + i)
    return keys


@njit(cache=True)
@versioned
def _key(seed: Any, position: Any) -> Any:
    ours = _mixed(seed * np.uint64(GOLDEN)) ^ np.uint64(position + 1) * np.uint64(MIX_1)
    return _mixed(ours) + np.uint64(GOLDEN)


@subroutine
def _mixed(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))

"""The Triton kernels between a layer's products, each doing the work of some ten operations.

Rows are independent: a row's result is the same bits whatever the other rows. Numbers are summed in float32 and rounded
once, when they are stored. The kernels for CPUs have the same steps.

`normed`, `gated`, `entered` and `opened` launch them, for the layers of a target and of a draft head.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.core.batch import BLOCK_SIZE
from engine.kernels.layer.weights import Norm
from engine.model.cuda.padded_rows import Places
from engine.model.kv_pool import KVPool

_GATE_TILE = 1024
_UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def norm(
    residual,  # [rows, hidden] float32, to which delta is added
    delta,  # [rows, hidden]
    weight,  # [hidden] float32
    out,  # [rows, hidden]
    epsilon,
    HIDDEN: tl.constexpr,
    FILLED: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Add and normalise: residual += delta, if there is one; out = residual / sqrt(mean(residual^2) + epsilon) *
    weight.
    """
    place = tl.program_id(0).to(tl.int64) * HIDDEN
    dim = tl.arange(0, FILLED)
    there = dim < HIDDEN
    x = tl.load(residual + place + dim, mask=there, other=0.0)
    if ADDED:
        x += tl.load(delta + place + dim, mask=there, other=0.0).to(tl.float32)
        tl.store(residual + place + dim, x, mask=there)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HIDDEN + epsilon)
    found = x * scale * tl.load(weight + dim, mask=there, other=0.0)
    tl.store(out + place + dim, found.to(out.dtype.element_ty), mask=there)


@triton.jit
def gate(gate_up, out, INNER: tl.constexpr, TILE: tl.constexpr):
    """Compute out = silu(gate) * up. gate_up: [rows, 2 * inner]; out: [rows, inner]."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = dim < INNER
    x = tl.load(gate_up + row * 2 * INNER + dim, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * INNER + INNER + dim, mask=there, other=0.0).to(tl.float32)
    found = x / (1.0 + tl.exp(-x)) * up
    tl.store(out + row * INNER + dim, found.to(out.dtype.element_ty), mask=there)


@triton.jit
def open_gates(attended, qkv, out, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    """Compute out = attended * sigmoid(gate). attended, out: [rows, heads * head_dim]; qkv: see `enter`, rows of WIDE
    numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = dim < HEADS * HEAD_DIM
    x = tl.load(attended + row * (HEADS * HEAD_DIM) + dim, mask=there, other=0.0).to(tl.float32)
    place = row * WIDE + (dim // HEAD_DIM * 2 + 1) * HEAD_DIM + dim % HEAD_DIM
    gate = tl.load(qkv + place, mask=there, other=0.0).to(tl.float32)
    found = x / (1.0 + tl.exp(-gate))
    tl.store(out + row * (HEADS * HEAD_DIM) + dim, found.to(out.dtype.element_ty), mask=there)


@triton.jit
def enter(
    qkv,  # [rows, (heads * query_parts + 2 * kv_heads) * head_dim]: queries, keys, values
    norms,  # [2, head_dim] float32: of queries, and of keys
    cos_sin,  # [positions, rotated] float32: cosines of half of the rotated dimensions, then sines
    positions,  # [rows]
    sources,  # [rows] the row whose key and value this one stores
    blocks,  # [rows] the block in which it stores them
    lanes,  # [rows] the place in that block
    queries,  # out: [rows, heads, head_dim]
    keys,  # out: [blocks, kv_heads, dims, 16]
    values,  # out: [blocks, kv_heads, 16, dims]
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_FILLED: tl.constexpr,
    DIMS: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    QUERY_PARTS: tl.constexpr,  # 2: a head's query is followed by its gate
):
    """Normalise and rotate one head's query or key, or take its value; write it to its place."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    source = tl.where(is_query, row, tl.load(sources + row))
    part = tl.where(is_query, head * QUERY_PARTS, head + HEADS * (QUERY_PARTS - 1))
    x_at = qkv + (source * (HEADS * QUERY_PARTS + 2 * KV_HEADS) + part) * HEAD_DIM
    dim = tl.arange(0, HEAD_FILLED)
    there = dim < HEAD_DIM
    half: tl.constexpr = ROTATED // 2
    turned = (dim < ROTATED) & (head < HEADS + KV_HEADS)
    partner = tl.where(dim < half, dim + half, dim - half)
    x = tl.load(x_at + dim, mask=there, other=0.0).to(tl.float32)
    other = tl.load(x_at + partner, mask=turned, other=0.0).to(tl.float32)
    if NORMED:
        weight = norms + tl.where(is_query, 0, HEAD_DIM)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HEAD_DIM + epsilon)
        x = tl.where(is_value, x, x * scale * tl.load(weight + dim, mask=there, other=0.0))
        other = other * scale * tl.load(weight + partner, mask=turned, other=0.0)
    angle = cos_sin + tl.load(positions + source) * ROTATED + dim % half
    cosine = tl.load(angle, mask=turned, other=1.0)
    sine = tl.load(angle + half, mask=turned, other=0.0)
    x = x * cosine + tl.where(dim < half, -other, other) * sine
    block = tl.load(blocks + row)
    lane = tl.load(lanes + row)
    if is_query:
        tl.store(queries + (row * HEADS + head) * HEAD_DIM + dim, x.to(queries.dtype.element_ty), mask=there)
    elif is_value:
        place = ((block * KV_HEADS + head - HEADS - KV_HEADS) * BLOCK_SIZE + lane) * DIMS
        tl.store(values + place + dim, x.to(values.dtype.element_ty), mask=there)
    else:
        place = (block * KV_HEADS + head - HEADS) * DIMS * BLOCK_SIZE + lane
        tl.store(keys + place + dim * BLOCK_SIZE, x.to(keys.dtype.element_ty), mask=there)


def normed(residual: Tensor, delta: Tensor, by: Norm, added: bool = True) -> Tensor:
    """Return [rows, hidden] of delta's type: the norm of the residual, [rows, hidden] float32, to which
    delta is added.
    """
    out, (rows, hidden) = torch.empty_like(delta), residual.shape
    sizes = {"HIDDEN": hidden, "FILLED": triton.next_power_of_2(hidden), "ADDED": added}
    norm[(rows,)](residual, delta, by.weight, out, by.epsilon, **sizes, **_UNFUSED)
    return out


def gated(gate_up: Tensor) -> Tensor:
    """Return [rows, inner] of [rows, 2 * inner]."""
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    gate[(rows, triton.cdiv(inner, _GATE_TILE))](gate_up, out, INNER=inner, TILE=_GATE_TILE, **_UNFUSED)
    return out


def opened(attended: Tensor, qkv: Tensor) -> Tensor:
    """Multiply the output of attention, [rows, heads, head_dim], by the sigmoid of the gates, which follow each head's
    query in `qkv`. Returns [rows, heads * head_dim].
    """
    rows, heads, head_dim = attended.shape
    out = attended.new_empty(rows, heads * head_dim)
    sizes = {"HEADS": heads, "HEAD_DIM": head_dim, "WIDE": qkv.shape[1], "TILE": _GATE_TILE}
    open_gates[(rows, triton.cdiv(heads * head_dim, _GATE_TILE))](attended, qkv, out, **sizes, **_UNFUSED)
    return out


def entered(
    pool: KVPool,
    layer: int,
    qkv: Tensor,
    places: Places,
    cos_sin: Tensor,
    norms: Tensor | None,
    epsilon: float,
    gated: bool = False,
) -> Tensor:
    """Return queries [rows, heads, head_dim]; keys and values go to the layer's part of the pool.

    qkv: [rows, (heads + 2 * kv_heads) * head_dim], heads may be 0. cos_sin: [positions, rotated] float32, cosines of
    half of the rotated dimensions, then sines. norms: [2, head_dim] float32, of each head's query and key, or None.
    gated: each head's query is followed by its gate, which is not read.
    """
    shape, rows = pool.shape, len(qkv)
    heads = (qkv.shape[1] // shape.head_dim - 2 * shape.kv_heads) // (1 + gated)
    queries = qkv.new_empty(rows, heads, shape.head_dim)
    enter[(rows, heads + 2 * shape.kv_heads)](
        qkv,
        cos_sin if norms is None else norms,  # a pointer that is not read
        cos_sin,
        places.positions,
        places.sources,
        places.blocks,
        places.lanes,
        queries,
        pool.keys[layer],
        pool.values[layer],
        epsilon,
        HEADS=heads,
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=shape.head_dim,
        HEAD_FILLED=triton.next_power_of_2(shape.head_dim),
        DIMS=shape.dims,
        ROTATED=cos_sin.shape[1],
        BLOCK_SIZE=BLOCK_SIZE,
        NORMED=norms is not None,
        QUERY_PARTS=1 + gated,
        num_warps=1,
        **_UNFUSED,
    )
    return queries

"""Walks down drafted trees on the GPU, and what an accepted path takes with it: keys, values and hidden states, and the
check of blocks that it fills.

Each is one kernel for all trees of a round, and none needs anything from the host that depends on what was accepted.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.core.batch import BLOCK_SIZE
from engine.model.kv_pool import KVPool

_NODES = 128  # nodes of a tree that are compared at once
_PART = 2048  # numbers of a row that a program copies
_NOBODY = -2  # a node that has no children


@triton.jit(do_not_specialize=["reach"])
def walk(
    tokens,  # [nodes] int32: what is drawn at each node; negative where that is not known
    drafted,  # [nodes] int32: the nodes' own tokens
    parents,  # [nodes] int32, within the tree
    begins,  # [trees + 1] int32: each tree's first node
    paths,  # out: [trees, reach] int32: accepted nodes, root first
    lengths,  # out: [trees] int32
    following,  # out: [trees, reach] int64: what is drawn at these nodes; 0 where that is not known, and past them
    reach,
    NODES: tl.constexpr,
    NOBODY: tl.constexpr,
):
    """Walk down a tree while it has the token that is drawn."""
    tree = tl.program_id(0)
    begin = tl.load(begins + tree)
    count = tl.load(begins + tree + 1) - begin
    node = tl.program_id(0) * 0
    length = tl.program_id(0) * 0
    for step in range(reach):
        token = tl.program_id(0) * 0
        if node >= 0:
            tl.store(paths + tree * reach + step, node)
            length += 1
            token = tl.load(tokens + begin + node)
            child = tl.program_id(0) * 0 + NOBODY
            for at in range(0, count, NODES):
                other = at + tl.arange(0, NODES)
                there = other < count
                parent = tl.load(parents + begin + other, mask=there, other=NOBODY)
                own = tl.load(drafted + begin + other, mask=there, other=NOBODY)
                child = tl.maximum(child, tl.max(tl.where((parent == node) & (own == token), other, NOBODY), 0))
            node = child
        tl.store(following + tree * reach + step, tl.maximum(token, 0).to(tl.int64))
    tl.store(lengths + tree, length)


@triton.jit(do_not_specialize=["reach"])
def move(
    keys,  # [layers, blocks, kv_heads, dims, 16]
    values,  # [layers, blocks, kv_heads, 16, dims]
    paths,
    lengths,
    begins,
    slots,  # [nodes] int32: where each node's keys and values are
    moves,  # [trees] int32: whether its are to be moved
    layer_numbers,
    reach,
    KV_HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    FILLED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Copy the keys and values of a tree's path to the first slots of the tree, one node after the other: no slot is
    written before it was read.
    """
    tree, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin = tl.load(begins + tree)
    number = tl.arange(0, FILLED)
    there = number < KV_HEADS * DIMS
    of_values = number // DIMS * (DIMS * BLOCK_SIZE) + number % DIMS
    keys += layer * layer_numbers
    values += layer * layer_numbers
    length = tl.where(tl.load(moves + tree) > 0, tl.load(lengths + tree), 0)
    for step in range(1, length):
        source = tl.load(slots + begin + tl.load(paths + tree * reach + step))
        place = tl.load(slots + begin + step)
        if source != place:
            old = (source // BLOCK_SIZE).to(tl.int64) * (KV_HEADS * DIMS * BLOCK_SIZE)
            new = (place // BLOCK_SIZE).to(tl.int64) * (KV_HEADS * DIMS * BLOCK_SIZE)
            key = tl.load(keys + old + number * BLOCK_SIZE + source % BLOCK_SIZE, mask=there)
            value = tl.load(values + old + of_values + source % BLOCK_SIZE * DIMS, mask=there)
            tl.store(keys + new + number * BLOCK_SIZE + place % BLOCK_SIZE, key, mask=there)
            tl.store(values + new + of_values + place % BLOCK_SIZE * DIMS, value, mask=there)


@triton.jit(do_not_specialize=["reach", "width"])
def gather(
    states,  # [rows, width] bfloat16
    rows,  # [nodes] int32: each node's row
    paths,
    lengths,
    begins,
    out,  # [trees, sent, width] bfloat16
    reach,
    width,
    PART: tl.constexpr,
):
    """Copy the hidden states of a tree's path; past it there are zeros."""
    tree, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    there = step < tl.load(lengths + tree)
    node = tl.load(begins + tree) + tl.load(paths + tree * reach + step, mask=there, other=0)
    row = tl.load(rows + node).to(tl.int64)
    at = tl.program_id(2) * PART + tl.arange(0, PART)
    state = tl.load(states + row * width + at, mask=there & (at < width), other=0.0)
    place = (tree * tl.num_programs(1) + step) * width
    tl.store(out + place + at, state, mask=at < width)


@triton.jit
def check(
    keys,
    values,
    blocks,  # [blocks] int32
    flawed,  # out: [blocks, layers] int8: 1 where a number is not finite
    layer_numbers,
    NUMBERS: tl.constexpr,  # of a block
    PART: tl.constexpr,
):
    """Check the keys and values of one block in one layer."""
    block, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = layer * layer_numbers + tl.load(blocks + block).to(tl.int64) * NUMBERS
    found = tl.zeros([PART], tl.int32)
    for begin in range(0, NUMBERS, PART):
        number = begin + tl.arange(0, PART)
        key = tl.load(keys + at + number, mask=number < NUMBERS, other=0.0).to(tl.float32)
        value = tl.load(values + at + number, mask=number < NUMBERS, other=0.0).to(tl.float32)
        finite = (tl.abs(key) < float("inf")) & (tl.abs(value) < float("inf"))
        found += tl.where(finite, 0, 1)
    tl.store(flawed + block * tl.num_programs(1) + layer, (tl.max(found, 0) > 0).to(tl.int8))


class Walked(NamedTuple):
    """Accepted paths: their nodes, [trees, reach] int32, their lengths, and the tokens drawn at these nodes, [trees,
    reach] int64, 0 where the host has to draw and past a path's end.
    """

    paths: Tensor
    lengths: Tensor
    following: Tensor


def walk_trees(tokens: Tensor, drafted: Tensor, parents: Tensor, begins: Tensor, reach: int) -> Walked:
    """Walk down all trees. reach: of the longest path that may be."""
    trees, device = len(begins) - 1, tokens.device
    paths, lengths = (torch.empty(*shape, dtype=torch.int32, device=device) for shape in ((trees, reach), (trees,)))
    found = Walked(paths, lengths, torch.empty(trees, reach, dtype=torch.int64, device=device))
    walk[(trees,)](tokens, drafted, parents, begins, *found, reach, NODES=_NODES, NOBODY=_NOBODY, num_warps=1)
    return found


def move_paths(pool: KVPool, paths: Tensor, lengths: Tensor, begins: Tensor, slots: Tensor, moves: Tensor) -> None:
    """Move the keys and values of accepted paths in all layers, for the trees that `moves` marks."""
    shape, (trees, reach) = pool.shape, paths.shape
    move[(trees, shape.layers)](
        pool.keys, pool.values, paths, lengths, begins, slots, moves, pool.keys[0].numel(), reach,
        KV_HEADS=shape.kv_heads, DIMS=shape.dims, FILLED=triton.next_power_of_2(shape.kv_heads * shape.dims),
        BLOCK_SIZE=BLOCK_SIZE,
    )  # fmt: skip


def gather_path_rows(states: Tensor, rows: Tensor, paths: Tensor, lengths: Tensor, begins: Tensor, out: Tensor) -> None:
    """Gather the hidden states of accepted paths. states: [rows, ...]; out: [trees, sent, width] bfloat16."""
    trees, sent, width = out.shape
    parts = triton.cdiv(width, _PART)
    gather[(trees, sent, parts)](
        states.to(out.dtype).contiguous(), rows, paths, lengths, begins, out, paths.shape[1], width, PART=_PART
    )


def check_blocks(pool: KVPool, blocks: Tensor, flawed: Tensor) -> None:
    """Find blocks with numbers that are not finite. blocks: [blocks] int32; flawed: [blocks, layers] int8, written."""
    numbers = pool.keys[0, 0].numel()
    check[tuple(flawed.shape)](
        pool.keys, pool.values, blocks, flawed, pool.keys[0].numel(), NUMBERS=numbers, PART=_PART
    )

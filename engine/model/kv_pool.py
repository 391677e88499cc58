"""Keys and values of all requests in blocks of 16 positions, in one pool.

A request has a block table. Blocks are reference-counted, and a full block is known by the text it ends (a prefix
cache): requests whose texts begin alike share blocks, at the same time or one after the other. Unreferenced blocks stay
cached until their room is needed; the least recently used goes first. For a draft head a block's hidden states are
kept with it. With a cache folder, full blocks are also written to it, and read back when the pool does not have them.
A block with an infinity or NaN stays with its request, and so does what follows it.

Layout: keys [layers, blocks, kv_heads, dims, 16], so that 16 keys are read at once, and values [layers, blocks,
kv_heads, 16, dims]; dims is the head size rounded up to a multiple of 16, padded with zeros. Paired, for instructions
that multiply pairs of bfloat16: a block's keys are [dims / 2, 16, 2], its values [dims / 16, 8, 16, 2] with the pairs
of neighbouring positions, and dims is a multiple of 32. In codes of 8 bits, both are [layers, blocks, kv_heads, bytes]:
`engine.kernels.attention.kv_codes` says what these hold.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import BLOCK, Int
from engine.core.errors import OutOfBlocks
from engine.core.hidden_states import States
from engine.core.kv_shape import KVShape
from engine.files.cache_folder import CacheFolder
from engine.kernels.attention.finite_blocks import FiniteBlocks
from engine.kernels.attention.kv_codes import move_codes_kernel
from engine.kernels.fused import MOVE, move_kernel
from engine.model.cuda.graphs import uploaded
from engine.model.request_state import RequestState
from engine.model.saved_blocks import SavedBlocks
from engine.model.saved_states import SavedStates
from engine.model.state_pool import SLOTS_EACH, StatePool

_CPU = torch.device("cpu")
_ON_DISK = -1  # in place of the number of a text whose block the cache folder alone has
_STATES_SHARE = 4  # hidden states may take one part in so many of what keys and values take, beside them
Ending = tuple[int, tuple[int, ...]]
"""The text that a full block ends: the number of the text before it (0: none), and its own 16 tokens."""
Moves = tuple[Int, Int]
"""Slots whose keys and values move, and the slots that they move to."""


class KVPool:
    """A pool of `blocks` blocks. On a CPU, a block takes memory when it is first written; on a GPU, all do at once.

    layer_states: where the states of a model are whose layers do not all have keys and values. A prefix is then served
    up to its last snapshot.
    """

    def __init__(self, shape: KVShape, blocks: int, device: torch.device = _CPU, layer_states: StatePool | None = None):
        self.shape, self.blocks, self.layer_states = shape, blocks, layer_states
        sizes = [(shape.head_bytes,)] * 2 if shape.q8_0 else [(shape.dims, BLOCK), (BLOCK, shape.dims)]
        dtype, of_pool = torch.uint8 if shape.q8_0 else shape.dtype, (shape.layers, blocks, shape.kv_heads)
        self.keys, self.values = (_untouched((*of_pool, *size), dtype, device) for size in sizes)
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unreferenced, least recently used first
        self._known: dict[Ending, tuple[int, int]] = {}  # the block, and the number of the text that it ends
        self._ending: dict[int, Ending] = {}
        self._states: OrderedDict[int, States] = OrderedDict()  # of known blocks, used longest ago first
        self._states_room = blocks * shape.block_bytes // _STATES_SHARE
        self._state_layers: tuple[int, ...] = ()
        self._numbers = count(1)
        self._finite = FiniteBlocks(shape, blocks, *self.addresses(0)) if device.type == "cpu" else None
        self.saved: SavedBlocks | None = None

    def save_to(self, folder: CacheFolder, identity: bytes) -> None:
        """Write full blocks to a folder from now on, and read those of the same identity back. On a CPU alone."""
        self.saved = SavedBlocks(folder, identity, self.keys, self.values)
        if self.layer_states is not None:
            self.layer_states.saved = SavedStates(folder, self.layer_states.states)

    def addresses(self, layer: int) -> tuple[int, int]:
        """The addresses of the layer's keys and values."""
        keys, values = (part.data_ptr() + layer * part.stride(0) * part.itemsize for part in (self.keys, self.values))
        return keys, values

    @property
    def free(self) -> int:
        """The number of unreferenced blocks."""
        return len(self._free) + len(self._idle)

    def has_state_beside(self, caches: Sequence[KVCache]) -> bool:
        """Whether one more request gets the slots that it needs, if any, beside those of these caches."""
        if self.layer_states is None:
            return True
        promised = sum(cache.state.missing for cache in caches if cache.state is not None)
        return self.layer_states.has_free(promised + SLOTS_EACH)

    def take(self, wanted: int) -> list[int]:
        """Take `wanted` blocks; OutOfBlocks, and none is taken, if fewer are free."""
        if wanted > self.free:
            raise OutOfBlocks(f"verifier.kv_memory: {wanted} more blocks are needed and {self.free} are free; raise it")
        taken = [self._free.pop() if self._free else self._forget_oldest() for _ in range(wanted)]
        for block in taken:
            self._references[block] = 1
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._ending:
                self._idle[block] = None
            else:
                self._free.append(block)

    def find(self, ending: Ending, with_states: bool = False) -> tuple[int, int] | None:
        """The block that ends this text, with one more reference, and the text's number. with_states: only if its
        hidden states are there too.
        """
        if (known := self._known.get(ending)) is None or (with_states and known[0] not in self._states):
            return None
        block, _ = known
        self._idle.pop(block, None)
        self._references[block] += 1
        return known

    def number(self, ending: Ending, with_states: bool = False) -> int:
        """The number of this text, 0 if no block ends it. with_states: or if its hidden states are not there."""
        known = self._known.get(ending)
        return 0 if known is None or (with_states and known[0] not in self._states) else known[1]

    def restore(self, ending: Ending, key: bytes, with_states: bool = False) -> tuple[int, int] | None:
        """What `find` returns, from the cache folder. key: of the text there."""
        assert self.saved is not None
        states = self.saved.read_states(key, self._state_layers) if with_states else None
        if with_states and states is None:
            return None
        if ending in self._known:
            block, _ = self._known[ending]
        elif self.free and (content := self.saved.read(key)) is not None:
            [block] = self.take(1)
            self.saved.place(content, block)
            if finite := self.finite([block])[0]:
                self.publish(ending, block)
            self.give([block])
            if not finite:
                return None
        else:
            return None
        if states is not None:
            self._keep_states(block, states)
        return self.find(ending, with_states)

    def save(self, ending: Ending, number: int, key: bytes) -> None:
        """Write the block that ends the text of that number, and its hidden states if there are any, unless they have
        been evicted by then.
        """
        assert self.saved is not None
        layers = self._state_layers

        def block() -> int | None:
            known = self._known.get(ending)
            return known[0] if known is not None and known[1] == number else None

        def states() -> States | None:
            found = None if (place := block()) is None else self._states.get(place)
            return found if block() == place and self._state_layers == layers else None

        self.saved.save(key, block)
        if layers:
            self.saved.save_states(key, layers, states)

    def finite(self, blocks: Sequence[int]) -> list[bool]:
        """Whether each block's keys and values are all finite: others must not be published."""
        if not blocks:
            return []
        return finite_by_index(self.keys, self.values, blocks) if self._finite is None else self._finite(blocks)

    def publish(self, ending: Ending, block: int, states: States | None = None) -> int:
        """Register the full block that ends this text; returns the text's number. Of two blocks the first stays.

        states: the block's hidden states, if a draft head wants them. Those used longest ago make room for new ones.
        """
        if ending not in self._known:
            self._known[ending] = block, next(self._numbers)
            self._ending[block] = ending
        known, number = self._known[ending]
        if states is not None and known not in self._states:
            self._keep_states(known, states)
        return number

    def _keep_states(self, block: int, states: States) -> None:
        room = self._states_room // states.nbytes
        while self._states and len(self._states) >= room:
            self._states.popitem(last=False)
        if room:
            self._states[block] = states

    def states(self, block: int) -> States:
        """The hidden states of a block that was found with them."""
        self._states.move_to_end(block)
        return self._states[block]

    def forget_states(self, layers: Sequence[int]) -> None:
        """Drop all hidden states: another draft head wants those of these layers."""
        self._state_layers = tuple(layers)
        self._states.clear()

    def _forget_oldest(self) -> int:
        block, _ = self._idle.popitem(last=False)
        _, number = self._known.pop(self._ending.pop(block))
        if self.layer_states is not None:
            self.layer_states.drop(number)
        self._states.pop(block, None)
        return block

    def move(self, sources: Int, places: Int) -> None:
        """Copy keys and values from slots to other slots. No place is the source of a later copy."""
        if self.keys.device.type != "cpu":
            move_by_index(self.keys, self.values, sources, places)
            return
        shape, work = self.shape, np.zeros(1, MOVE)
        record = work[0]
        record["keys"], record["values"] = self.keys.data_ptr(), self.values.data_ptr()
        record["sources"], record["places"], record["count"] = sources.ctypes.data, places.ctypes.data, len(sources)
        record["layers"], record["blocks"], record["kv_heads"] = shape.layers, self.blocks, shape.kv_heads
        record["dims"], record["width"], record["vnni"] = shape.dims, shape.dtype.itemsize, shape.vnni
        kernel = move_codes_kernel() if shape.q8_0 else move_kernel()
        kernel(work.ctypes.data, shape.layers)


@torch.inference_mode()  # the mode in which a target makes its pool
def move_by_index(keys: Tensor, values: Tensor, sources: Int, places: Int) -> None:
    """What `KVPool.move` does, for a pool on any device."""
    indexes = np.stack([*np.divmod(sources, BLOCK), *np.divmod(places, BLOCK)]).astype(np.int64)
    ((old, old_lane, new, new_lane),) = uploaded([torch.from_numpy(indexes)], keys.device)
    keys[:, new, :, :, new_lane] = keys[:, old, :, :, old_lane]
    values[:, new, :, new_lane] = values[:, old, :, old_lane]


@torch.inference_mode()
def finite_by_index(keys: Tensor, values: Tensor, blocks: Sequence[int]) -> list[bool]:
    """What `KVPool.finite` returns, for a pool on any device: one wait for all blocks."""
    both = [part[:, list(blocks)].isfinite().movedim(1, 0).flatten(1).all(1) for part in (keys, values)]
    found: list[bool] = (both[0] & both[1]).tolist()
    return found


def _untouched(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no CPU memory until they are written; `torch.zeros` would touch all of it."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    bytes_of: int = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(bytes_of, np.uint8)).view(dtype).view(size)


class KVCache:
    """One request's keys and values. length: committed positions; pending: rows after them that are still drafts.
    tenant: whose blocks in the cache folder it shares. spoiled: whether the block after those that it has published is
    not finite.
    """

    def __init__(self, pool: KVPool, tenant: str = ""):
        self.pool, self.saved = pool, pool.saved
        self.state = None if pool.layer_states is None else RequestState(pool.layer_states)
        self.length = self.pending = 0
        self.spoiled = False
        self.table: Int = np.zeros(0, np.int32)
        self._texts: list[int] = []  # the numbers of the texts that its first full blocks end
        self._keys = [] if self.saved is None else [self.saved.root(tenant)]  # in the cache folder, of the same texts

    @property
    def capacity(self) -> int:
        """The positions that it has blocks for."""
        return len(self.table) * BLOCK

    def reserve(self, positions: int) -> None:
        """Take blocks for at least `positions` positions; OutOfBlocks if there are not enough."""
        missing = -(-positions // BLOCK) - len(self.table)
        if missing > 0:
            self.table = np.concatenate([self.table, np.asarray(self.pool.take(missing), np.int32)])
        if self.state is not None:
            self.state.reserve()

    def trim(self) -> None:
        """Return the blocks after the committed positions: drafts that were not accepted hold none."""
        used = -(-self.length // BLOCK)
        self.pool.give(self.table[used:].tolist())
        self.table = self.table[:used]

    def commit(self, path: Sequence[int]) -> None:
        """Keep the entries of the last tree's nodes `path` (ascending) as the next committed positions."""
        commit_all([(self, path)])

    def keep(self, path: Sequence[int]) -> Moves | None:
        """What `commit` does, but for the entries that are not in place yet: the moves to come, if there are any."""
        length, self.pending = self.length, 0
        self.length += len(path)
        if self.state is not None:
            self.state.commit(path, self.length)
        in_place = next((i for i, node in enumerate(path) if node != i), len(path))
        if in_place == len(path):
            return None
        sources = np.asarray(path[in_place:], np.int32) + np.int32(length)
        return self._slots(sources), self._slots(np.arange(length + in_place, self.length, dtype=np.int32))

    def next_ending(self, text: Sequence[int]) -> Ending | None:
        """What the block after the committed positions will end; None unless it begins there and `text` fills it."""
        at = len(self._texts)
        if self.length != at * BLOCK or len(text) < self.length + BLOCK:
            return None
        return (self._texts[-1] if at else 0), tuple(text[self.length : self.length + BLOCK])

    def adopt(self, text: Sequence[int], with_states: bool = False) -> list[States]:
        """Reuse the cached blocks of `text`, one by one. Returns their hidden states if these are needed."""
        if self.state is None:
            return self._adopt_blocks(text, len(text) // BLOCK, with_states)
        return self._adopt_state(self.state, text, with_states)

    def _adopt_blocks(self, text: Sequence[int], most: int, with_states: bool) -> list[States]:
        """Reuse cached blocks until there are `most`."""
        states = []
        while (
            len(self._texts) < most
            and (ending := self.next_ending(text))
            and (known := self._find(ending, with_states))
        ):
            block, number = known
            if with_states:
                states.append(self.pool.states(block))
            at = len(self._texts)
            if at < len(self.table):
                self.pool.give([int(self.table[at])])
                self.table[at] = block
            else:
                self.table = np.append(self.table, np.int32(block))
            self._note(ending, number)
            self.length += BLOCK
        return states

    def _adopt_state(self, state: RequestState, text: Sequence[int], with_states: bool) -> list[States]:
        """Reuse cached blocks up to the last one at whose end a snapshot is, and go on from that. Snapshots at the last
        full block of the text, and at the end of what was found, are to last: other texts may part there too.
        """
        held, pool = len(self._texts), state.pool
        state.wanted.add(len(text) // BLOCK * BLOCK)
        if self.next_ending(text) is None or state.searched == pool.kept:
            return []
        state.searched = pool.kept
        found, most = self._reach(pool, text, with_states)
        if most < found:
            state.wanted.add(found * BLOCK)
        states = self._adopt_blocks(text, most, with_states)
        stay, slot = len(self._texts), None
        while stay > held and (slot := self._snapshot(pool, stay - 1, held == 0)) is None:
            stay -= 1
        if slot is not None:
            state.adopt(slot, stay * BLOCK)
        if stay < len(self._texts):
            self.pool.give(self.table[stay:][::-1].tolist())
            self.table, self.length = self.table[:stay], stay * BLOCK
            del self._texts[stay:], self._keys[stay + 1 :]
        return states[: stay - held]

    def _reach(self, pool: StatePool, text: Sequence[int], with_states: bool) -> tuple[int, int]:
        """Return how many blocks of the text are known, and how many of them lead to the last snapshot. Nothing is
        read or held.
        """
        at = most = held = len(self._texts)
        number, key = (self._texts[-1] if at else 0), self._keys[-1] if self.saved is not None else b""
        while len(text) >= (at + 1) * BLOCK:
            tokens = tuple(text[at * BLOCK : (at + 1) * BLOCK])
            number = self.pool.number((number, tokens), with_states)
            if self.saved is not None:
                key = self.saved.next_key(key, tokens)
            on_disk = self.saved is not None and self.saved.has(key)
            if not number and not on_disk:
                break
            at, number = at + 1, number or _ON_DISK
            if pool.has(number, key if held == 0 and on_disk else None):
                most = at
        return at, most

    def _snapshot(self, pool: StatePool, at: int, from_disk: bool) -> int | None:
        """The state at the end of the block of that index."""
        if (slot := pool.find(self._texts[at])) is None and from_disk and self.saved is not None:
            return pool.restore(self._texts[at], self._keys[at + 1])
        return slot

    def _find(self, ending: Ending, with_states: bool) -> tuple[int, int] | None:
        if (known := self.pool.find(ending, with_states)) is not None or self.saved is None:
            return known
        return self.pool.restore(ending, self.saved.next_key(self._keys[-1], ending[1]), with_states)

    def _note(self, ending: Ending, number: int) -> None:
        """The pool knows the next full block by that number."""
        self._texts.append(number)
        if self.saved is not None:
            self._keys.append(self.saved.next_key(self._keys[-1], ending[1]))
            self.pool.save(ending, number, self._keys[-1])

    def publish(self, text: Sequence[int], states_of: Callable[[int], States | None] = lambda at: None) -> None:
        """Let other requests find the full blocks. text: at least the committed positions. states_of: the hidden states
        of a block, if they are known.
        """
        new = range(len(self._texts), len(self._texts) if self.spoiled else self.length // BLOCK)
        for at, finite in zip(new, self.pool.finite(self.table[new.start : new.stop].tolist()), strict=True):
            if not finite:
                self.spoiled = True
                break
            ending = (self._texts[-1] if at else 0), tuple(text[at * BLOCK : (at + 1) * BLOCK])
            self._note(ending, self.pool.publish(ending, int(self.table[at]), states_of(at)))
        if self.state is not None:
            self._publish_snapshots(self.state)

    def _publish_snapshots(self, state: RequestState) -> None:
        """Let other requests find the snapshots that were taken since the last time. One behind a block that is not
        finite is dropped.
        """
        pool = state.pool
        searched = state.searched == pool.kept
        for position, slot, lasts in state.saved:
            if position > len(self._texts) * BLOCK:
                pool.give(slot)
                continue
            number = self._texts[position // BLOCK - 1]
            pool.keep(number, slot, lasts)
            pool.give(slot)
            if not lasts:
                pool.replace(state.rolling)
                state.rolling = number
            elif self.saved is not None:
                pool.save(number, self._keys[position // BLOCK])
        state.saved = []
        if searched:
            state.searched = pool.kept  # its own snapshots are none that it could go on from

    def release(self) -> None:
        """Return the blocks to the pool."""
        self.pool.give(self.table[::-1].tolist())  # evicted from its end: without its beginning a text is not found
        if self.state is not None:
            if self.saved is not None and self.state.rolling in self._texts:
                self.state.pool.save(self.state.rolling, self._keys[self._texts.index(self.state.rolling) + 1])
            self.state.release()
        self.table, self._texts = np.zeros(0, np.int32), []
        self.length = self.pending = 0
        self.spoiled = False
        if self.saved is not None:
            self.saved.used(self._keys[1:])
            del self._keys[1:]

    def _slots(self, positions: Int) -> Int:
        slots: Int = self.table[positions // BLOCK] * np.int32(BLOCK) + positions % np.int32(BLOCK)
        return slots


def commit_all(accepted: Sequence[tuple[KVCache, Sequence[int]]]) -> None:
    """`KVCache.commit` of caches of one pool, each with its path: all entries are moved at once, as launches on a GPU
    take the same time whatever they move.
    """
    if moves := [moved for cache, path in accepted if (moved := cache.keep(path)) is not None]:
        sources, places = moves[0] if len(moves) == 1 else map(np.concatenate, zip(*moves, strict=True))
        accepted[0][0].pool.move(sources, places)

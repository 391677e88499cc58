"""One request's keys and values: its blocks of the pool, which of them others may use, and which rows are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np

from engine.core.batch import BLOCK_SIZE, Int
from engine.core.hidden_states import States
from engine.model.kv_pool import BlockKey, KVPool
from engine.model.request_state import RequestState
from engine.model.state_pool import StatePool

_ON_DISK = -1  # stands in place of the number of a text whose block the cache folder alone has
Moves = tuple[Int, Int]
"""Slots whose keys and values move, and the slots that they move to."""


class KVCache:
    """One request's keys and values. length: committed positions; pending: rows after them that are still drafts.
    tenant: whose blocks in the cache folder it shares. spoiled: whether the block after those that it has cached is
    not finite. moved: rows of the last tree whose entries a GPU has moved to the first places after `length`; checked:
    blocks that it has found finite or not since. ahead: positions after the next commit's that a forward under way
    writes.
    """

    def __init__(self, pool: KVPool, tenant: str = ""):
        self.pool, self.saved = pool, pool.saved
        self.state = None if pool.layer_states is None else RequestState(pool.layer_states)
        self.length = self.pending = 0
        self.spoiled = False
        self.moved: Sequence[int] = ()
        self.checked: dict[int, bool] = {}
        self.ahead = 0
        self.block_table: Int = np.zeros(0, np.int32)
        self._texts: list[int] = []  # the numbers of the texts that its first full blocks end
        self._keys = [] if self.saved is None else [self.saved.root(tenant)]  # in the cache folder, of the same texts

    @property
    def capacity(self) -> int:
        """The positions that it has blocks for."""
        return len(self.block_table) * BLOCK_SIZE

    def reserve(self, positions: int) -> None:
        """Take blocks for at least `positions` positions; OutOfBlocks if there are not enough."""
        missing = -(-positions // BLOCK_SIZE) - len(self.block_table)
        if missing > 0:
            self.block_table = np.concatenate([self.block_table, np.asarray(self.pool.allocate(missing), np.int32)])
        if self.state is not None:
            self.state.reserve()

    def trim(self) -> None:
        """Return the blocks after the committed positions: drafts that were not accepted hold none."""
        used = -(-(self.length + self.ahead) // BLOCK_SIZE)
        self.pool.release(self.block_table[used:].tolist())
        self.block_table = self.block_table[:used]

    def commit(self, path: Sequence[int]) -> None:
        """Keep the entries of the last tree's nodes `path` (ascending) as the next committed positions."""
        commit_all([(self, path)])

    def keep(self, path: Sequence[int]) -> Moves | None:
        """Commit as `commit` does, except for the entries that are not in place yet: return the moves to come, if there
        are any.
        """
        length, self.pending = self.length, 0
        moved, self.moved = self.moved, ()
        self.length += len(path)
        if self.state is not None:
            self.state.commit(path, self.length)
        there = zip_longest(path, moved[: len(path)])
        in_place = next((i for i, (node, place) in enumerate(there) if node not in (i, place)), len(path))
        if in_place == len(path):
            return None
        self.checked = {}
        sources = np.asarray(path[in_place:], np.int32) + np.int32(length)
        return self.slots(sources), self.slots(np.arange(length + in_place, self.length, dtype=np.int32))

    def next_block_key(self, text: Sequence[int]) -> BlockKey | None:
        """Return the key of the block after the committed positions; None unless a block begins there and `text` fills
        it.
        """
        at = len(self._texts)
        if self.length != at * BLOCK_SIZE or len(text) < self.length + BLOCK_SIZE:
            return None
        return BlockKey(self._texts[-1] if at else 0, tuple(text[self.length : self.length + BLOCK_SIZE]))

    def match_prefix(self, text: Sequence[int], with_hidden_states: bool = False) -> list[States]:
        """Reuse the cached blocks of `text`, one by one. Returns their hidden states if these are needed."""
        if self.state is None:
            return self._match_blocks(text, len(text) // BLOCK_SIZE, with_hidden_states)
        return self._match_state(self.state, text, with_hidden_states)

    def _match_blocks(
        self, text: Sequence[int], most: int, with_hidden_states: bool, keys: Sequence[bytes] = ()
    ) -> list[States]:
        """Reuse cached blocks until there are `most`. keys: of the next blocks in the cache folder, as far as they are
        known.
        """
        states, known_keys = [], iter(keys)
        while len(self._texts) < most and (block_key := self.next_block_key(text)):
            key = next(known_keys, None) or self._key_after(self._last_key, block_key.tokens)
            if (known := self._find(block_key, key, with_hidden_states)) is None:
                break
            block, number = known
            if with_hidden_states:
                states.append(self.pool.hidden_states(block))
            at = len(self._texts)
            if at < len(self.block_table):
                self.pool.release([int(self.block_table[at])])
                self.block_table[at] = block
            else:
                self.block_table = np.append(self.block_table, np.int32(block))
            self._note(block_key, number, key)
            self.length += BLOCK_SIZE
        return states

    def _match_state(self, state: RequestState, text: Sequence[int], with_hidden_states: bool) -> list[States]:
        """Reuse cached blocks up to the last one at whose end a snapshot is, and go on from that. Snapshots at the last
        full block of the text, and at the end of what was found, are to last: other texts may part there too.
        """
        held, pool = len(self._texts), state.pool
        state.prompt_end = len(text) // BLOCK_SIZE * BLOCK_SIZE
        state.wanted.add(state.prompt_end)
        if self.next_block_key(text) is None or state.searched == pool.kept:
            return []
        state.searched = pool.kept
        found, most, keys = self._reach(pool, text, with_hidden_states)
        if most < found:
            state.wanted.add(found * BLOCK_SIZE)
        states = self._match_blocks(text, most, with_hidden_states, keys)
        stay, slot = len(self._texts), None
        while stay > held and (slot := self._snapshot(pool, stay - 1, held == 0)) is None:
            stay -= 1
        if slot is not None:
            state.adopt(slot, stay * BLOCK_SIZE)
        if stay < len(self._texts):
            self.pool.release(self.block_table[stay:][::-1].tolist())
            self.block_table, self.length = self.block_table[:stay], stay * BLOCK_SIZE
            del self._texts[stay:], self._keys[stay + 1 :]
        return states[: stay - held]

    def _reach(self, pool: StatePool, text: Sequence[int], with_hidden_states: bool) -> tuple[int, int, list[bytes]]:
        """Return how many blocks of the text are known, how many of them lead to the last snapshot, and the keys of
        those that the cache does not have yet. Nothing is read or held.
        """
        at = most = held = len(self._texts)
        number, keys = (self._texts[-1] if at else 0), [self._last_key]
        while len(text) >= (at + 1) * BLOCK_SIZE:
            tokens = tuple(text[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE])
            number = self.pool.number(BlockKey(number, tokens), with_hidden_states)
            key = self._key_after(keys[-1], tokens)
            on_disk = self.saved is not None and self.saved.has(key)
            if not number and not on_disk:
                break
            at, number = at + 1, number or _ON_DISK
            keys.append(key)
            if pool.has(number, key if held == 0 and on_disk else None):
                most = at
        return at, most, keys[1:]

    def _snapshot(self, pool: StatePool, at: int, from_disk: bool) -> int | None:
        """Return the state at the end of the block of that index."""
        if (slot := pool.find(self._texts[at])) is None and from_disk and self.saved is not None:
            return pool.restore(self._texts[at], self._keys[at + 1])
        return slot

    @property
    def _last_key(self) -> bytes:
        """The key of its last full block in the cache folder."""
        return self._keys[-1] if self._keys else b""

    def _key_after(self, key: bytes, tokens: Sequence[int]) -> bytes:
        """Return the key of the block of these tokens after the text of `key`; without a cache folder it has none."""
        return b"" if self.saved is None else self.saved.next_key(key, tokens)

    def _find(self, block_key: BlockKey, key: bytes, with_hidden_states: bool) -> tuple[int, int] | None:
        """Return the block that ends this text and the text's number, from the pool or the cache folder."""
        if (known := self.pool.find(block_key, with_hidden_states)) is not None or self.saved is None:
            return known
        return self.pool.restore(block_key, key, with_hidden_states)

    def _note(self, block_key: BlockKey, number: int, key: bytes) -> None:
        """Record that the pool knows the next full block by that number, and the cache folder by that key."""
        self._texts.append(number)
        if self.saved is not None:
            self._keys.append(key)
            self.pool.save(block_key, number, key)

    def cache_blocks(self, text: Sequence[int], states_of: Callable[[int], States | None] = lambda at: None) -> None:
        """Let other requests find the full blocks. text: at least the committed positions. states_of: the hidden states
        of a block, if they are known.
        """
        new = range(len(self._texts), len(self._texts) if self.spoiled else self.length // BLOCK_SIZE)
        for at, finite in zip(new, self._finite(self.block_table[new.start : new.stop].tolist()), strict=True):
            if not finite:
                self.spoiled = True
                break
            block_key = BlockKey(self._texts[-1] if at else 0, tuple(text[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]))
            number = self.pool.cache_block(block_key, int(self.block_table[at]), states_of(at))
            self._note(block_key, number, self._key_after(self._last_key, block_key.tokens))
        if self.state is not None:
            self._cache_snapshots(self.state)

    def _finite(self, blocks: list[int]) -> list[bool]:
        """Return whether each block's keys and values are all finite, which a GPU may have told already."""
        checked, self.checked = self.checked, {}
        return [checked[block] for block in blocks] if checked.keys() >= {*blocks} else self.pool.finite(blocks)

    def _cache_snapshots(self, state: RequestState) -> None:
        """Let other requests find the snapshots that were taken since the last time. A snapshot after a block that is
        not finite is dropped.
        """
        pool, newest = state.pool, 0
        searched = state.searched == pool.kept
        for position, slot, lasts in state.saved:
            if position > len(self._texts) * BLOCK_SIZE:
                pool.give(slot)
                continue
            number, newest = self._texts[position // BLOCK_SIZE - 1], position
            pool.keep(number, slot, None if lasts else position)
            pool.give(slot)
            state.latest = number
            if lasts and self.saved is not None:
                pool.save(number, self._keys[position // BLOCK_SIZE])
        if newest:
            pool.thin(self._texts, newest, state.prompt_end or 0)
        state.saved = []
        if searched:
            state.searched = pool.kept  # its own snapshots are none that it could go on from

    def release(self) -> None:
        """Return the blocks to the pool."""
        self.pool.release(self.block_table[::-1].tolist())  # evicted from the end: a text is found by its beginning
        if self.state is not None:
            self.state.pool.spare(latest := self.state.latest)
            if self.saved is not None and latest in self._texts:
                self.state.pool.save(latest, self._keys[self._texts.index(latest) + 1])
            self.state.release()
        self.block_table, self._texts = np.zeros(0, np.int32), []
        self.length = self.pending = 0
        self.spoiled, self.moved, self.checked, self.ahead = False, (), {}, 0
        if self.saved is not None:
            self.saved.used(self._keys[1:])
            del self._keys[1:]

    def slots(self, positions: Int) -> Int:
        """Return the places in the pool of these positions."""
        slots: Int = self.block_table[positions // BLOCK_SIZE] * np.int32(BLOCK_SIZE) + positions % np.int32(BLOCK_SIZE)
        return slots


def commit_all(accepted: Sequence[tuple[KVCache, Sequence[int]]]) -> None:
    """Commit caches of one pool, each with its path: all entries are moved at once, as launches on a GPU take the same
    time whatever they move.
    """
    if moves := [moved for cache, path in accepted if (moved := cache.keep(path)) is not None]:
        sources, places = moves[0] if len(moves) == 1 else map(np.concatenate, zip(*moves, strict=True))
        accepted[0][0].pool.move(sources, places)

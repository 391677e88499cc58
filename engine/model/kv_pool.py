"""Keys and values of all requests in blocks of 16 positions, in one pool.

A request has a block table. Blocks are reference-counted, and a full block is known by the text it ends (a prefix
cache): requests whose texts begin alike share blocks, at the same time or one after the other. Unreferenced blocks stay
cached until their room is needed; the least recently used goes first. For a draft head a block's hidden states are
kept with it. With a cache folder, full blocks are also written to it, and read back when the pool does not have them.
A block with an infinity or NaN stays with its request, and so does what follows it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.batch import Int
from engine.core.errors import OutOfBlocks
from engine.core.hidden_states import HostStates, States
from engine.core.kv_shape import KVShape
from engine.files.cache_folder import CacheFolder
from engine.model.kv_part import KVPart
from engine.model.request_state import RequestState
from engine.model.saved.blocks import SavedBlocks
from engine.model.saved.states import SavedStates
from engine.model.state_pool import SLOTS_EACH, StatePool

_CPU = torch.device("cpu")
_HIDDEN_STATES_SHARE = 4  # hidden states may take one part in so many of what keys and values take, beside them


class BlockKey(NamedTuple):
    """The text that a full block ends. prefix_id: the number of the text before the block, 0 if there is none; tokens:
    the block's own 16.
    """

    prefix_id: int
    tokens: tuple[int, ...]


class KVPool:
    """A pool of `blocks` blocks. A block has its place in every part: one for each shape of keys that layers have.

    layer_states: where the states of a model are whose layers do not all have keys and values. A prefix is then served
    up to its last snapshot.
    """

    def __init__(
        self,
        shapes: KVShape | Sequence[KVShape],
        blocks: int,
        device: torch.device = _CPU,
        layer_states: StatePool | None = None,
    ):
        self.blocks, self.layer_states = blocks, layer_states
        self.parts = [KVPart(one, blocks, device) for one in ([shapes] if isinstance(shapes, KVShape) else shapes)]
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unreferenced, least recently used first
        self._known: dict[BlockKey, tuple[int, int]] = {}  # the block, and the number of the text that it ends
        self._key_of: dict[int, BlockKey] = {}
        self._hidden_states: OrderedDict[int, States] = OrderedDict()  # of known blocks, used longest ago first
        self._hidden_states_room = blocks * self.block_bytes // _HIDDEN_STATES_SHARE
        self._hidden_state_layers: tuple[int, ...] = ()
        self._numbers = count(1)
        self.saved: SavedBlocks | None = None

    def save_to(self, folder: CacheFolder, identity: bytes) -> None:
        """Write full blocks to a folder from now on, and read those of the same identity back. On a CPU alone."""
        self.saved = SavedBlocks(folder, identity, [kept for part in self.parts for kept in (part.keys, part.values)])
        if self.layer_states is not None:
            self.layer_states.saved = SavedStates(folder, self.layer_states.states.numpy())

    @property
    def part(self) -> KVPart:
        """The only part, where all layers have keys of one shape."""
        [part] = self.parts
        return part

    @property
    def shape(self) -> KVShape:
        return self.part.shape

    @property
    def keys(self) -> Tensor:
        return self.part.keys

    @property
    def values(self) -> Tensor:
        return self.part.values

    @property
    def addresses(self) -> Callable[[int], tuple[int, int]]:
        return self.part.addresses

    @property
    def kind(self) -> str:
        """The name of what numbers are kept as."""
        return self.parts[0].shape.kind

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, keys and values of all layers."""
        return sum(part.shape.block_bytes for part in self.parts)

    @property
    def free(self) -> int:
        """The number of unreferenced blocks."""
        return len(self._free) + len(self._idle)

    def has_state_beside(self, states: Sequence[RequestState | None]) -> bool:
        """Return whether one more request gets the slots that it needs, if any, beside those of other requests'
        states.
        """
        if self.layer_states is None:
            return True
        promised = sum(state.missing for state in states if state is not None)
        return self.layer_states.has_free(promised + SLOTS_EACH)

    def allocate(self, wanted: int) -> list[int]:
        """Allocate `wanted` blocks. Raises OutOfBlocks, and allocates none, if fewer are free."""
        if wanted > self.free:
            raise OutOfBlocks(f"verifier.kv_memory: {wanted} more blocks are needed and {self.free} are free; raise it")
        taken = [self._free.pop() if self._free else self._forget_oldest() for _ in range(wanted)]
        for block in taken:
            self._references[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. One that nobody uses is free, or stays cached until its room is needed."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def find(self, block_key: BlockKey, with_hidden_states: bool = False) -> tuple[int, int] | None:
        """Return the block that ends this text, with one more reference, and the text's number; None if it is not
        cached. with_hidden_states: only if the block's hidden states are cached too.
        """
        known = self._known.get(block_key)
        if known is None or (with_hidden_states and known[0] not in self._hidden_states):
            return None
        block, _ = known
        self._idle.pop(block, None)
        self._references[block] += 1
        return known

    def number(self, block_key: BlockKey, with_hidden_states: bool) -> int:
        """Return the number of this text, 0 if no block ends it. with_hidden_states: 0 also if its hidden states are
        not cached.
        """
        known = self._known.get(block_key)
        return 0 if known is None or (with_hidden_states and known[0] not in self._hidden_states) else known[1]

    def restore(self, block_key: BlockKey, key: bytes, with_hidden_states: bool = False) -> tuple[int, int] | None:
        """Read a block from the cache folder and return what `find` returns. key: of the text in the folder."""
        assert self.saved is not None
        states = self.saved.read_hidden_states(key, self._hidden_state_layers) if with_hidden_states else None
        if with_hidden_states and states is None:
            return None
        if block_key in self._known:
            block, _ = self._known[block_key]
        elif self.free and (content := self.saved.read(key)) is not None:
            [block] = self.allocate(1)
            self.saved.place(content, block)
            if finite := self.finite([block])[0]:
                self.cache_block(block_key, block)
            self.release([block])
            if not finite:
                return None
        else:
            return None
        if states is not None:
            self._keep_hidden_states(block, states)
        return self.find(block_key, with_hidden_states)

    def save(self, block_key: BlockKey, number: int, key: bytes) -> None:
        """Write the block that ends the text of that number, and its hidden states if there are any, unless they have
        been evicted by then.
        """
        assert self.saved is not None
        layers = self._hidden_state_layers

        def block() -> int | None:
            known = self._known.get(block_key)
            return known[0] if known is not None and known[1] == number else None

        def states() -> HostStates | None:
            found = None if (place := block()) is None else self._hidden_states.get(place)
            assert not isinstance(found, Tensor)  # a folder is there on a CPU alone
            return found if block() == place and self._hidden_state_layers == layers else None

        self.saved.save(key, block)
        if layers:
            self.saved.save_hidden_states(key, layers, states)

    def finite(self, blocks: Sequence[int]) -> list[bool]:
        """Return whether each block's keys and values are all finite: others must not be cached."""
        if not blocks:
            return []
        return [all(of_parts) for of_parts in zip(*(part.finite(blocks) for part in self.parts), strict=True)]

    def cache_block(self, block_key: BlockKey, block: int, states: States | None = None) -> int:
        """Register the full block that ends this text; returns the text's number. Of two blocks the first stays.

        states: the block's hidden states, if a draft head wants them. Those used longest ago make room for new ones.
        """
        if block_key not in self._known:
            self._known[block_key] = block, next(self._numbers)
            self._key_of[block] = block_key
        known, number = self._known[block_key]
        if states is not None and known not in self._hidden_states:
            self._keep_hidden_states(known, states)
        return number

    def _keep_hidden_states(self, block: int, states: States) -> None:
        room = self._hidden_states_room // states.nbytes
        while self._hidden_states and len(self._hidden_states) >= room:
            self._hidden_states.popitem(last=False)
        if room:
            self._hidden_states[block] = states

    def hidden_states(self, block: int) -> States:
        """Return the hidden states of a block that was found with them."""
        self._hidden_states.move_to_end(block)
        return self._hidden_states[block]

    def forget_hidden_states(self, layers: Sequence[int]) -> None:
        """Drop all hidden states: another draft head wants those of these layers."""
        self._hidden_state_layers = tuple(layers)
        self._hidden_states.clear()

    def _forget_oldest(self) -> int:
        block, _ = self._idle.popitem(last=False)
        _, number = self._known.pop(self._key_of.pop(block))
        if self.layer_states is not None:
            self.layer_states.drop(number)
        self._hidden_states.pop(block, None)
        return block

    def move(self, sources: Int, places: Int) -> None:
        """Copy keys and values from slots to other slots. No place is the source of a later copy."""
        for part in self.parts:
            part.move(sources, places)

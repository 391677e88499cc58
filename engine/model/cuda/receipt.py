"""What a round's trees came to, found on the GPU behind the forward and sent to the host in one piece.

The host launches all of it before the forward has ended: tokens are drawn at every node, each tree is walked down, the
keys and values of the accepted path are moved to their places, its hidden states are gathered, and the blocks that it
may fill are checked. So a round waits for the device once, when all of that has arrived. A tree's walk is that of
`engine.sampling.sampler.verify`, as far as it depends on the logits alone: what a request's own rules end or change, as
a stop token does, the host finds when it verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import Int
from engine.core.drafter_protocol import DeviceVerdicts, OnItsWay
from engine.core.hidden_states import States
from engine.device import Download, uploaded
from engine.model.cuda.noise_kernels import draw_tokens, noise_keys
from engine.model.cuda.walk_kernels import Walked, check_blocks, gather_path_rows, move_paths, walk_trees
from engine.model.kv_pool import KVPool
from engine.model.runner import bfloat16_bits
from engine.sampling.drawn_tree import DrawnTree

_STATE_ROWS, _LEAST_ROWS = 128, 4  # accepted rows whose hidden states are sent: of all trees, and of each at least
_STAYING_ROWS = 512  # of those that stay on the device, where a head may read them before it is known how many they are
_ALIGNED = 16


class Receipt:
    """What is drawn and gathered of a forward's output: logits, [rows wanted, vocab]; states, [rows, layers, hidden],
    None if nobody wants them.

    trees: those that are drawn from; what depends on more than the logits is left to the host. pool: where their keys
    and values are. rows: how many rows, the first ones, are of drafted trees; chunks of prompts follow. successors: how
    many of the likeliest tokens of each of these rows are wanted. states_stay: whether the hidden states that are
    wanted are left on the device, where the drafter takes them from.
    """

    def __init__(
        self,
        trees: Sequence[DrawnTree],
        logits: Tensor,
        states: Tensor | None,
        pool: KVPool | None,
        rows: int = 0,
        successors: int = 0,
        states_stay: bool = False,
    ):
        self._stay, self._gathered = states_stay, logits.new_empty(0)
        self._asked, self._states, self._device, self._rows = trees, states, logits.device, rows
        self._places = {i: place for place, i in enumerate(i for i, one in enumerate(trees) if one.sampler.is_plain)}
        self._trees = [trees[i] for i in self._places]
        self._begins = [0, *accumulate(len(one.tree) for one in self._trees)]
        self._drawn: Tensor | None = None  # [nodes] int32, on the device
        self._walked: Walked | None = None
        self._tokens: list[int] | None = None  # once they are read
        self._paths: list[list[int]] = []
        self._fetched: dict[int, States] = {}  # of longer paths than are sent
        self._successors = successors
        nothing = logits.new_empty(0)
        self._filled = [one.blocks for one in self._trees]
        packed = self._launch(logits.contiguous(), pool) if self._trees else nothing
        # a view would hold all rows of the forward
        self._chunk_states = nothing if states is None else states[rows:].to(torch.bfloat16, copy=states_stay)
        self._sent = Download([
            packed,
            nothing if states_stay else self._chunk_states,
            logits[:rows].topk(successors).indices.int() if successors else nothing,
        ])  # fmt: skip

    @property
    def roots(self) -> Tensor | None:
        """[trees] int32: what is drawn at each tree's root, on the device; None unless all trees are roots alone that
        it draws from.
        """
        return self._drawn if len(self._trees) == len(self._asked) == self._begins[-1] else None

    @property
    def on_device(self) -> DeviceVerdicts | None:
        """What the trees that are drawn from there came to, if all that may be accepted of them has stayed there."""
        if self._walked is None or self._states is None or not self._stay:
            return None
        _, lengths, tokens = self._walked
        if self._rows_sent < tokens.shape[1]:
            return None
        return DeviceVerdicts(
            self._places, lengths, tokens, self._gathered.view(*tokens.shape, *self._states.shape[1:])
        )

    def wait(self, behind: OnItsWay | None = None) -> float:
        """Wait until all has arrived, and let the caches know which blocks are finite. behind: what was launched behind
        it and is wanted too. It arrives last, so the host waits for it alone; returns the seconds that it took.
        """
        if behind is not None:
            behind.read()
        packed, blocks = self._sent.read()[0], [*chain.from_iterable(self._filled)]
        behind_s = 0.0 if behind is None else behind.seconds_after(self._sent)
        if not blocks:
            return behind_s
        flawed = packed[self._end :].view(len(blocks), -1).any(1).tolist()
        finite = {block: not one for block, one in zip(blocks, flawed, strict=True)}
        for one, filled in zip(self._trees, self._filled, strict=True):
            if filled:
                one.cache.checked = {block: finite[block] for block in filled}
        return behind_s

    def _launch(self, logits: Tensor, pool: KVPool | None) -> Tensor:
        """Draw, walk, move, check and gather. Returns the bytes of the tokens drawn, of the states of accepted rows,
        and of what was found in blocks.
        """
        count, nodes = len(self._trees), self._begins[-1]
        reach = 1 + max(int(one.tree.depths.max()) for one in self._trees)
        most = max(_LEAST_ROWS, (_STAYING_ROWS if self._stay else _STATE_ROWS) // count)
        self._rows_sent = 0 if self._states is None else min(reach, most)
        width = 0 if self._states is None else self._states[0].numel()
        begin = -(-4 * nodes // _ALIGNED) * _ALIGNED
        end = begin + (0 if self._stay else 2 * count * self._rows_sent * width)
        filled = sum(map(len, self._filled))
        layers = 0 if pool is None else pool.shape.layers
        buffer = torch.empty(end + filled * layers, dtype=torch.uint8, device=self._device)
        tokens, found = buffer[: 4 * nodes].view(torch.int32), buffer[begin:end].view(torch.bfloat16)
        if self._stay:
            found = found.new_empty(count * self._rows_sent * width)
        arrays = uploaded(self._arrays(), self._device)
        rows, drafted, parents, slots, keys, temperatures, begins, moves, blocks = arrays
        draw_tokens(logits, rows, keys, temperatures, tokens)
        self._walked = walk_trees(tokens, drafted, parents, begins, reach)
        paths, lengths, _ = self._walked
        if pool is not None:
            move_paths(pool, paths, lengths, begins, slots, moves)
            if filled:
                check_blocks(pool, blocks, buffer[end:].view(torch.int8).view(filled, layers))
        if self._states is not None:
            self._gathered = found.view(count, self._rows_sent, width)
            gather_path_rows(self._states, rows, paths, lengths, begins, self._gathered)
        self._begin, self._end, self._drawn = begin, end, tokens
        return buffer

    def _arrays(self) -> list[Tensor]:
        """Return what the kernels need to know of the trees: of each node, then of each tree; and the blocks."""
        parts, trees = self._trees, [one.tree for one in self._trees]
        samplings = [one.sampler.params for one in parts]
        places = [
            (sampling.seed, one.sampler.position + depth)
            for one, sampling in zip(parts, samplings, strict=True)
            for depth in one.tree.depths.tolist()
        ]
        temperatures = [0.0 if sampling.greedy else sampling.temperature for sampling in samplings]
        of_nodes = (
            np.concatenate([np.arange(one.first, one.first + len(one.tree)) for one in parts]),
            np.concatenate([tree.tokens for tree in trees]),
            np.concatenate([tree.parents for tree in trees]),
            np.concatenate([one.slots for one in parts]),
        )
        return [
            *(torch.from_numpy(array.astype(np.int32)) for array in of_nodes),
            noise_keys(places),
            torch.tensor(np.repeat(temperatures, list(map(len, trees))), dtype=torch.float32),
            torch.tensor(self._begins, dtype=torch.int32),
            torch.tensor([one.moves for one in parts], dtype=torch.int32),
            torch.tensor([*chain.from_iterable(self._filled)], dtype=torch.int32),
        ]

    def known(self, index: int) -> list[int] | None:
        """Return what is drawn at each node of the tree of that index (`engine.sampling.sampler.LogitsView`); None if
        that depends on more than the logits.
        """
        if (place := self._places.get(index)) is None:
            return None
        return self._read()[self._begins[place] : self._begins[place + 1]]

    def states_of(self, index: int, path: Sequence[int]) -> States | None:
        """Return [path, layers, hidden] of the nodes on the accepted path of the tree of that index."""
        if self._states is None:
            return None
        if (place := self._places.get(index)) is not None:
            self._read()
            if list(path) == self._paths[place][: len(path)]:
                return self._of_paths(place)[: len(path)]
        return self._fetch(self._asked[index].first + np.asarray(path, np.int64))

    def _of_paths(self, place: int) -> States:
        """Return the states of the path that the device has walked in the tree of that place, of those that were sent;
        or else, fetched for all such trees at once.
        """
        assert self._states is not None
        if len(path := self._paths[place]) <= self._rows_sent:
            if self._stay:
                return self._gathered[place, : len(path)].view(len(path), *self._states.shape[1:])
            width = 2 * self._states[0].numel()
            at = self._begin + place * self._rows_sent * width
            sent = self._sent.read()[0][at : at + len(path) * width].numpy().view(np.uint16)
            found: States = sent.reshape(len(path), *self._states.shape[1:]).copy()  # a view would hold all of `sent`
            return found
        if not self._fetched:
            long = [i for i, path in enumerate(self._paths) if len(path) > self._rows_sent]
            rows = [self._trees[i].first + np.asarray(self._paths[i], np.int64) for i in long]
            fetched, ends = self._fetch(np.concatenate(rows)), accumulate(map(len, rows))
            self._fetched = {i: fetched[end - len(self._paths[i]) : end] for i, end in zip(long, ends, strict=True)}
        return self._fetched[place]

    def _fetch(self, rows: NDArray[np.int64]) -> States:
        """Take the states of these rows. To read them on the host waits for the device."""
        assert self._states is not None
        found = self._states.index_select(0, *uploaded([torch.from_numpy(rows)], self._device))
        return found.to(torch.bfloat16) if self._stay else bfloat16_bits(found)

    def read_states(self, first: int, count: int) -> States | None:
        """Return [count, layers, hidden] of rows of prompts, from `first` on."""
        if self._states is None:
            return None
        rows = slice(first - self._rows, first - self._rows + count)
        if self._stay:
            return self._chunk_states[rows]
        found: States = self._sent.read()[1][rows].view(torch.uint16).numpy().copy()
        return found

    def successors_of(self, first: int, count: int) -> Int | None:
        """Return [count, successors] int32: the likeliest tokens of a tree's rows, from `first` on."""
        if not self._successors:
            return None
        found: Int = self._sent.read()[2][first : first + count].numpy()
        return found

    def _read(self) -> list[int]:
        """Return the tokens of all nodes, once they have arrived."""
        if self._tokens is None:
            self.take(self._sent.read()[0][: 4 * self._begins[-1]].view(torch.int32).tolist())
        assert self._tokens is not None
        return self._tokens

    def take(self, tokens: list[int]) -> None:
        """Walk as the device did, given what it has drawn, and let the caches know what it has moved."""
        self._tokens = tokens
        for one, begin, end in zip(self._trees, self._begins, self._begins[1:], strict=False):
            self._paths.append(one.tree.walk(tokens[begin:end]))
            if one.cache is not None and one.moves:
                one.cache.moved = self._paths[-1]

"""One request's state: where it is, and which rows of the latest forward a commit has it replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.core.batch import BLOCK_SIZE, Segment
from engine.kernels.state.walk import StateRows
from engine.model.state_pool import EMPTY, SLOTS_EACH, StatePool, stays


class Snapshot(NamedTuple):
    """The state after so many positions, a multiple of a block's. lasts: it is not thinned out."""

    position: int
    slot: int
    lasts: bool


class RequestState:
    """position: how many positions the state in `slot` has seen. Those committed after them are kept rows, which the
    next forward replays.

    wanted: positions whose snapshots are to last: where a prompt ends, or parts from one that was read before.
    prompt_end: the last full block of what is to be read ends there; None if the text is not shared. saved: snapshots
    that were taken and are still to be cached: at the last full block that was passed, and, of a shared text, where
    they stay. latest: the number of the text of its newest snapshot, 0 if there is none. searched: how many snapshots
    had been kept when one to go on from was last searched for.
    """

    def __init__(self, pool: StatePool):
        self.pool, self.slot, self.position = pool, EMPTY, 0
        self.wanted: set[int] = set()
        self.prompt_end: int | None = None
        self.saved: list[Snapshot] = []
        self.latest, self.searched = 0, -1
        self._kept: list[int] = []
        self._drafted: list[int] = []  # of the latest forward's tree, in the order of its nodes
        self._spare: list[int] = []  # slots to write to
        self._goals: list[tuple[int, int]] = []  # of the forward under way: positions, and where their states go
        self._read = 0  # rows of a text that the forward under way reads

    @property
    def missing(self) -> int:
        """How many slots it may still take."""
        return SLOTS_EACH - self.pool.owned(self.slot) - bool(self._spare)

    def reserve(self) -> None:
        """Take the slot that a forward may write to, if need be that of a snapshot; OutOfBlocks if there is none."""
        if self._spare:
            return
        if not self.pool.has_free():
            self._drop_saved()
        self._spare.append(self.pool.take())

    def rows(self, segment: Segment) -> StateRows:
        """Return what the next forward needs to know. Until `end` nothing has changed, so that it may be tried again.
        Node 0 of a tree that is grown level by level may be part of the text already.
        """
        held, tree = self.position + len(self._kept) - segment.past, segment.tree  # nodes that the state has seen
        if not 0 <= held <= min(segment.pending, 1):
            raise RuntimeError(f"a state after {segment.past + held} positions cannot go on after {segment.past}")
        self._return_goals()
        count, known = len(self._kept), segment.pending - held
        drafted, others = self._drafted[:known], self._drafted[known:]
        self._drafted = drafted
        self.pool.give_rows(others)
        stored = [] if tree is None else self.pool.take_rows(len(segment))
        self._drafted = [*drafted, *stored]
        if tree is None:
            self._read = len(segment)
            parents: Sequence[int] = range(-1, count + self._read - 1)
        else:
            self._read = 0
            parents = [*range(-1, count - 1), *(parent - held + count for parent in tree.parents[held:].tolist())]
        trunk = count + self._read
        if trunk:
            self._goals = self._new_goals(trunk)
        return StateRows(
            kept=[*self._kept, *drafted],
            parents=parents,
            stored=stored,
            trunk=trunk,
            slots=[self.slot, *(slot for _, slot in self._goals)],
            ends=[position - self.position for position, _ in self._goals],
        )

    def end(self) -> None:
        """End the forward: what it replayed is part of the state now. A text that it read becomes so by `commit`, as
        drafts do.
        """
        if not self._read:
            self._settle()

    def commit(self, path: Sequence[int], length: int) -> None:
        """Keep the rows of the latest forward that are given (ascending). length: positions with them. A row that is
        given many times, as for a measurement, is replayed once.
        """
        if self._read:
            if len(path) != self._read:
                raise ValueError(f"{len(path)} of a text's {self._read} rows cannot be committed")
            self._settle()
        else:
            self._kept = [self._drafted[node] for node in dict.fromkeys(path)]
            self.pool.give_rows([row for row in self._drafted if row not in self._kept])
            self._drafted = []
        self.position = length - len(self._kept)

    def adopt(self, slot: int, position: int) -> None:
        """Go on from a snapshot."""
        kept = self.pool.hold(slot)
        self._forget()
        self.slot, self.position = kept, position

    def release(self) -> None:
        """Return everything to the pool: the text is empty again."""
        self._forget()
        for slot in self._spare:
            self.pool.give(slot)
        self._drop_saved()
        self._spare, self.latest, self.searched, self.prompt_end = [], 0, -1, None
        self.wanted.clear()

    def _drop_saved(self) -> None:
        for snapshot in self.saved:
            self.pool.give(snapshot.slot)
        self.saved = []

    def _forget(self) -> None:
        self._return_goals()
        self.pool.give(self.slot)
        self.pool.give_rows([*self._kept, *self._drafted])
        self.slot, self.position, self._kept, self._drafted, self._read = EMPTY, 0, [], [], 0

    def _new_goals(self, trunk: int) -> list[tuple[int, int]]:
        """Return where the states after some of the next `trunk` rows go, the last one's among them. Committed rows are
        replayed in place if no other request uses the slot; what is read may have to be forgotten, and goes elsewhere.
        Only the last state may take the slot that is read: the windows of all are made of the one in it.
        """
        end = self.position + trunk
        in_place = not self._read and self.pool.owned(self.slot)
        goals = {end: self.slot if in_place else self._new_slot()}
        needed = {at for at in (end // BLOCK_SIZE * BLOCK_SIZE, *self.wanted) if self.position < at < end}
        for at in sorted(needed, reverse=True):
            if self._spare or self.pool.has_free():
                goals[at] = self._new_slot()
        for at in self._passing(end):
            if at not in goals and (slot := self.pool.take_passing()) is not None:
                goals[at] = slot
        return sorted(goals.items())

    def _new_slot(self) -> int:
        return self._spare.pop() if self._spare else self.pool.take()

    def _passing(self, end: int) -> Iterator[int]:
        """Yield the positions before `end`, and after that of the state, whose snapshots stay along a shared text."""
        if (prompt_end := self.prompt_end) is None:
            return
        for at in range(self.position // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE, end, BLOCK_SIZE):
            if stays(at, prompt_end, max(prompt_end, end)):
                yield at

    def _return_goals(self) -> None:
        """Return the slots of the latest forward's states, which are not those of the request. One of them may be
        written to again.
        """
        self._spare += [slot for _, slot in self._goals if slot != self.slot]
        while len(self._spare) > 1:
            self.pool.give(self._spare.pop())
        self._goals = []

    def _add(self, snapshots: Sequence[Snapshot]) -> None:
        """Note the snapshots of a forward. Earlier ones that do not last, and nobody has cached, are dropped."""
        for earlier in [one for one in self.saved if snapshots and not one.lasts]:
            self.saved.remove(earlier)
            self.pool.give(earlier.slot)
        self.saved += snapshots
        self.wanted -= {one.position for one in snapshots}

    def _settle(self) -> None:
        """Take the states of the forward under way as the request's."""
        if not self._goals:
            return
        end, slot = self._goals[-1]
        if end % BLOCK_SIZE == 0:
            self.pool.hold(slot)
        self._add([Snapshot(at, goal, at in self.wanted) for at, goal in self._goals if at % BLOCK_SIZE == 0])
        if self.slot not in [goal for _, goal in self._goals]:
            self.pool.give(self.slot)
        self.pool.give_rows(self._kept)
        self.slot, self.position, self._kept, self._goals, self._read = slot, end, [], [], 0

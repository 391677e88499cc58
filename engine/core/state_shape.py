"""What layers with a state keep of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_LINE = 64  # bytes of a cache line, at which every layer's part begins


@dataclass(frozen=True)
class StateShape:
    """Bytes of each layer with a state, in order. states: its state; rows: what it keeps of a row, from which the row
    is replayed once it is committed. Both lie in memory for all layers of a request, one after the other.
    """

    states: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def state_offsets(self) -> list[int]:
        """Where each layer's state begins, and where the last one ends."""
        return _offsets(self.states)

    @property
    def row_offsets(self) -> list[int]:
        """Where each layer's part of a row begins, and where the last one ends."""
        return _offsets(self.rows)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one request's state, which a snapshot takes too."""
        return self.state_offsets[-1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one kept row."""
        return self.row_offsets[-1]


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [*accumulate((-(-size // _LINE) * _LINE for size in sizes), initial=0)]

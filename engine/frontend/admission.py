"""Bounds how many requests an engine has accepted at once: a request holds a place until its answer has ended."""

from __future__ import annotations

import anyio

from engine.config import QueueConfig
from engine.core.errors import QueueFull

QueuePlace = object
"""A place in the queue; only its identity counts."""


class QueuePlaces:
    """The places of one engine, `queue.size` of them."""

    def __init__(self, options: QueueConfig):
        self.refuses = options.full == "refuse"
        self._size = options.size
        self._limiter = anyio.CapacityLimiter(options.size)
        self._beyond = set[QueuePlace]()

    @property
    def wanted(self) -> int:
        """The places taken, and the requests that wait for one."""
        return self._limiter.borrowed_tokens + self._limiter.statistics().tasks_waiting + len(self._beyond)

    def reserve(self, count: int) -> Reservation:
        """Take that many places at once, or none of them and raise QueueFull."""
        if self._limiter.available_tokens < count:
            raise QueueFull(f"queue.size={self._size}: all places are taken; try later or raise it")
        places = [QueuePlace() for _ in range(count)]
        for place in places:
            self._limiter.acquire_on_behalf_of_nowait(place)
        return Reservation(self, places)

    def beyond(self) -> Reservation:
        """Return a place beyond those of the queue, for a request of the server's own: it refuses no client's."""
        place = QueuePlace()
        self._beyond.add(place)
        return Reservation(self, [place])

    async def wait(self) -> QueuePlace:
        """Wait for a place and take it."""
        place = QueuePlace()
        await self._limiter.acquire_on_behalf_of(place)
        return place

    def leave(self, place: QueuePlace) -> None:
        """Free a place."""
        if place in self._beyond:
            self._beyond.remove(place)
        else:
            self._limiter.release_on_behalf_of(place)


class Reservation:
    """Places taken before their requests are known in full. `with` frees those that no request has taken over."""

    def __init__(self, places: QueuePlaces, unused: list[QueuePlace]):
        self._places, self._unused = places, unused

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._unused:
            self._places.leave(self._unused.pop())

    def take(self) -> QueuePlace:
        """Hand over a place, which its request frees."""
        return self._unused.pop()

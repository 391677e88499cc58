"""Places in an engine's queue."""

from __future__ import annotations

import asyncio

import pytest

from engine.config import QueueConfig
from engine.core.errors import QueueFull
from engine.frontend.admission import QueuePlaces


async def test_a_reservation_takes_all_of_its_places_or_none() -> None:
    places = QueuePlaces(QueueConfig(size=3))
    with places.reserve(2):
        with pytest.raises(QueueFull, match=r"^queue\.size=3: all places are taken"):
            places.reserve(2)
        assert places.wanted == 2
        with places.reserve(1):
            assert places.wanted == 3
    assert places.wanted == 0


async def test_a_place_that_a_request_took_over_outlives_its_reservation() -> None:
    places = QueuePlaces(QueueConfig(size=2))
    with places.reserve(2) as reservation:
        place = reservation.take()
    assert places.wanted == 1
    places.leave(place)
    assert places.wanted == 0


async def test_who_waits_gets_the_place_that_becomes_free() -> None:
    places = QueuePlaces(QueueConfig(size=1))
    first = await places.wait()
    waiting = asyncio.create_task(places.wait())
    await asyncio.sleep(0)
    assert places.wanted == 2
    places.leave(first)
    places.leave(await waiting)
    assert places.wanted == 0


async def test_a_place_beyond_the_queue_leaves_all_of_it_to_others() -> None:
    places = QueuePlaces(QueueConfig(size=1))
    with places.beyond() as own, places.reserve(1):
        place = own.take()
        assert places.wanted == 2
        with pytest.raises(QueueFull):
            places.reserve(1)
    assert places.wanted == 1
    places.leave(place)
    assert places.wanted == 0
    with places.reserve(1), pytest.raises(QueueFull):
        places.reserve(1)

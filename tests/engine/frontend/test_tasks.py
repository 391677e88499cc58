"""Pieces of work at once: never more than there are places, and none left when one fails."""

from __future__ import annotations

import asyncio

import pytest

from engine.frontend.tasks import gather, keep_under_way


async def test_as_many_as_there_are_places_are_under_way_and_all_are_done() -> None:
    under_way, most, done = 0, 0, []

    async def do(number: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001 * (number % 3))
        under_way -= 1
        done.append(number)

    await keep_under_way(3, range(10), do)
    assert most == 3 and sorted(done) == [*range(10)]


async def test_one_that_fails_ends_the_others() -> None:
    ended = []

    async def do(number: int) -> int:
        try:
            await asyncio.sleep(0 if number == 2 else 60)
        finally:
            ended.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="2"):
        await gather(do(number) for number in range(4))
    assert sorted(ended) == [0, 1, 2, 3]

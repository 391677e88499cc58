"""Runs concurrent work in one event loop that ends together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait for them to end, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather(work: Iterable[Awaitable[T]]) -> list[T]:
    """Do all of the work concurrently, and return its results; if one piece fails, or the caller leaves, the others end
    too.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)


async def keep_under_way(places: int, work: Iterable[T], do: Callable[[T], Awaitable[object]]) -> None:
    """Do all of the work, `places` pieces at a time: the next begins when one has ended."""
    waiting = iter(work)

    async def place() -> None:
        for one in waiting:
            await do(one)

    await gather(place() for _ in range(places))

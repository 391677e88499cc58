"""Work that goes on at once in one event loop, and ends together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel them and wait for their end, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather(work: Iterable[Awaitable[T]]) -> list[T]:
    """Do all of it at once; should one fail, or the caller leave, the others end too."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)


async def keep_under_way(places: int, work: Iterable[T], do: Callable[[T], Awaitable[object]]) -> None:
    """Do all of the work, so many pieces at a time: the next begins when one has ended."""
    waiting = iter(work)

    async def place() -> None:
        for one in waiting:
            await do(one)

    await gather(place() for _ in range(places))

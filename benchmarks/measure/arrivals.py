"""Requests that arrive at random."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from engine.frontend.tasks import gather

T = TypeVar("T")


def arrival_times(per_second: float, count: int, seed: str) -> list[float]:
    """Return when `count` requests arrive, in seconds: a Poisson process of that rate, the same for the same seed."""
    drawn = random.Random(seed)
    return list(itertools.accumulate(drawn.expovariate(per_second) for _ in range(count)))


async def ask_at(
    at_s: Sequence[float], asked: Sequence[T], ask: Callable[[T], Awaitable[None]], started_s: float
) -> None:
    """Ask each question at its time, in seconds after `started_s`, whatever is under way."""

    async def later(one: T, at: float) -> None:
        await asyncio.sleep(started_s + at - time.perf_counter())
        await ask(one)

    await gather(later(one, at) for one, at in zip(asked, at_s, strict=True))

"""Several answers at once: the events of each, in order of arrival."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from engine.answer import Piece, Result
from engine.api import Engine
from engine.server.metrics import Latencies
from engine.server.translate import Wanted
from engine.tasks import cancel

Event = tuple[int, Piece | Result]
"""The number of a choice, and what arrived for it."""
Events = AsyncGenerator[Event]


async def run(engine: Engine, wanted: Sequence[Wanted], latencies: Latencies) -> Events:
    """Yields (choice, piece) as they arrive and (choice, result) when a choice has ended. Closing it cancels all; if
    one fails, the others end too.
    """
    arrivals: asyncio.Queue[tuple[int, Piece | Result | Exception]] = asyncio.Queue()
    started_s = time.perf_counter()

    async def answer(choice: int) -> None:
        before_s = started_s
        try:
            async with engine.stream(wanted[choice].prompt, wanted[choice].sampling) as stream:
                async for piece in stream:
                    before_s = latencies.emitted(before_s, len(piece.token_ids), first=before_s == started_s)
                    arrivals.put_nowait((choice, piece))
            assert stream.result is not None
            arrivals.put_nowait((choice, stream.result))
        except Exception as error:
            arrivals.put_nowait((choice, error))

    tasks = [asyncio.create_task(answer(choice)) for choice in range(len(wanted))]
    left = len(tasks)
    try:
        while left:
            choice, arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            left -= isinstance(arrival, Result)
            yield choice, arrival
    finally:
        await cancel(tasks)

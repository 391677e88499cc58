"""Several answers at once: the events of each, in order of arrival."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

from engine.answer import Piece, Result
from engine.api import Engine, Stream
from engine.frontend.admission import Reservation
from engine.frontend.tasks import cancel, gather
from engine.server.metrics import Latencies
from engine.server.translate import ChoiceRequest
from engine.wire.messages import PromptProgress

Event = tuple[int, Piece | Result | PromptProgress]
"""The number of a choice, and what arrived for it."""


class RunningChoices:
    """The answers of one request. `async with` begins once the engine has accepted all of them, and raises what refuses
    one; it cancels those that have not ended when it is left. Iterating yields (choice, progress) while
    a long prompt is read, (choice, piece) as they arrive and (choice, result) when a choice has ended; if one fails,
    its error is raised.
    """

    def __init__(self, engine: Engine, wanted: Sequence[ChoiceRequest], latencies: Latencies, places: Reservation):
        self._arrivals: asyncio.Queue[tuple[int, Piece | Result | PromptProgress | Exception]] = asyncio.Queue()
        self._streams = [self._stream(engine, choice, one, places) for choice, one in enumerate(wanted)]
        self._latencies = latencies
        self._started_s = time.perf_counter()
        self._left = AsyncExitStack()

    def _stream(self, engine: Engine, choice: int, one: ChoiceRequest, places: Reservation) -> Stream:
        def note(progress: PromptProgress) -> None:
            self._arrivals.put_nowait((choice, progress))

        return engine.stream(one.prompt, one.sampling, places=places, visible=one.shown, on_progress=note, checked=True)

    async def __aenter__(self) -> RunningChoices:
        async with AsyncExitStack() as left:
            for stream in self._streams:
                left.push_async_callback(stream.aclose)
            await gather(stream.accepted() for stream in self._streams)
            tasks = [asyncio.create_task(self._follow(*one)) for one in enumerate(self._streams)]
            left.push_async_callback(cancel, tasks)
            self._left = left.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._left.aclose()

    async def __aiter__(self) -> AsyncIterator[Event]:
        left = len(self._streams)
        while left:
            choice, arrival = await self._arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            left -= isinstance(arrival, Result)
            yield choice, arrival

    async def _follow(self, choice: int, stream: Stream) -> None:
        before_s = self._started_s
        try:
            async for piece in stream:
                first = before_s == self._started_s
                before_s = self._latencies.emitted(before_s, len(piece.token_ids), first)
                self._arrivals.put_nowait((choice, piece))
            assert stream.result is not None
            self._arrivals.put_nowait((choice, stream.result))
        except Exception as error:
            self._arrivals.put_nowait((choice, error))

"""`talon pauses`: how much longer other requests wait for their tokens when a long prompt arrives."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from engine.api import Engine
from engine.config import Config
from engine.errors import ConfigError, RequestError
from engine.sampling import SamplingParams
from engine.tasks import cancel

_SETTLED = 12  # emissions of each request before anything counts
_USUAL = 24  # pauses of each request that serve as the baseline
_PROMPT = 24  # prompt tokens of the requests that decode


class Arrival(msgspec.Struct):
    """One long prompt that arrived. usual_s, beside_s: pauses between emissions of all decoding requests, before it
    came and while it was read; read_s: until its first token.
    """

    usual_s: list[float]
    beside_s: list[float]
    read_s: float

    @property
    def longest(self) -> float:
        """The longest pause while it was read, relative to the usual one."""
        return max(self.beside_s) / median(self.usual_s)

    @property
    def longest_usual(self) -> float:
        """As `longest`, for the pauses before it came: this machine's own variation."""
        return max(self.usual_s) / median(self.usual_s)


class Decoding:
    """Requests that decode until told to stop. times: of each request's emissions."""

    def __init__(self, engine: Engine, count: int, seed: int):
        self.engine, self.news = engine, asyncio.Event()
        self.times: list[list[float]] = [[] for _ in range(count)]
        draw = np.random.default_rng(seed)
        vocabulary = engine.target.vocab_size
        self.tasks = [
            asyncio.create_task(self._decode(draw.integers(vocabulary // 2, vocabulary, _PROMPT).tolist(), times))
            for times in self.times
        ]

    async def _decode(self, prompt: list[int], times: list[float]) -> None:
        sampling = SamplingParams(max_tokens=self.engine.target.context - len(prompt), ignore_eos=True)
        try:
            async with self.engine.stream(prompt, sampling) as stream:
                async for _ in stream:
                    times.append(time.perf_counter())
                    self.news.set()
        finally:
            self.news.set()

    async def emitted(self, count: int) -> None:
        """Wait until every request has emitted `count` times."""
        while min(map(len, self.times)) < count:
            for task in self.tasks:
                if task.done():
                    task.result()
                    raise RequestError(f"--prompt: an answer ended after {count} tokens; shorten the prompt")
            self.news.clear()
            await self.news.wait()

    def usual_s(self) -> list[float]:
        """The pauses of each request's first emissions that count."""
        return [
            after - before
            for times in self.times
            for before, after in itertools.pairwise(times[_SETTLED : _SETTLED + _USUAL + 1])
        ]

    def beside_s(self, first_s: float, last_s: float) -> list[float]:
        """The pauses that overlap that time."""
        return [
            after - before
            for times in self.times
            for before, after in itertools.pairwise(times)
            if first_s <= after and before <= last_s
        ]

    async def end(self) -> None:
        await cancel(self.tasks)


async def arrive(engine: Engine, count: int, length: int, seed: int) -> Arrival:
    """A prompt of `length` tokens arrives while `count` requests decode."""
    prompt = np.random.default_rng(-seed - 1 & 0xFFFF).integers(0, engine.target.vocab_size, length).tolist()
    decoding = Decoding(engine, count, seed)
    try:
        await decoding.emitted(_SETTLED + _USUAL + 1)
        arrived_s = time.perf_counter()
        await engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        read_s = time.perf_counter()
        await decoding.emitted(min(map(len, decoding.times)) + 2)
    finally:
        await decoding.end()
    return Arrival(decoding.usual_s(), decoding.beside_s(arrived_s, read_s), read_s - arrived_s)


async def measure(config: Config, count: int, length: int, repeats: int, console: Console) -> list[Arrival]:
    """Repeated measurements of one warm engine."""
    async with await Engine.start(config, **{"drafter.standby": False}) as engine:
        if length + 2 > engine.target.context:
            raise ConfigError(f"--prompt {length}: is over the model's context of {engine.target.context}")
        await engine.generate("Say hello.", SamplingParams(max_tokens=24, ignore_eos=True))
        arrivals = []
        for repeat in range(repeats):
            with console.status(f"prompt {repeat + 1} of {repeats}"):
                arrivals.append(await arrive(engine, count, length, repeat))
        return arrivals


def table(arrivals: Sequence[Arrival]) -> Table:
    """A line for each prompt, and their medians."""
    made = Table(title="Pauses between emissions, beside a long prompt")
    for column in ("", "usual ms", "longest", "beside it ms", "p95", "longest", "read in s"):
        made.add_column(column, justify="right")
    for number, arrival in enumerate(arrivals, 1):
        usual_s = median(arrival.usual_s)
        made.add_row(
            str(number),
            f"{1000 * usual_s:.0f}",
            f"{arrival.longest_usual:.2f}x",
            f"{1000 * median(arrival.beside_s):.0f}",
            f"{float(np.quantile(arrival.beside_s, 0.95)) / usual_s:.2f}x",
            f"{arrival.longest:.2f}x",
            f"{arrival.read_s:.1f}",
        )
    return made

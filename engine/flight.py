"""A request as the front end knows it: everything that a new verifier needs to go on where the last one stopped."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from engine.errors import TalonError
from engine.messages import Array, Submit, Tokens
from engine.sampling import SamplingParams


@dataclass
class Flight:
    """verifier: the worker that has the request, "" while none has. answer: the tokens heard of so far."""

    number: int
    prompt: list[int]
    sampling: SamplingParams
    arrivals: asyncio.Queue[Tokens | TalonError] = field(default_factory=asyncio.Queue)
    answer: list[int] = field(default_factory=list)
    verifier: str = ""
    ended: bool = False

    def hear(self, arrival: Tokens | TalonError) -> None:
        """Take in what a round emitted, or why there will be no more."""
        if isinstance(arrival, Tokens):
            self.answer += arrival.tokens
            self.ended = arrival.finish_reason is not None
        else:
            self.ended = True
        self.arrivals.put_nowait(arrival)

    def submission(self, defaults: SamplingParams) -> tuple[Submit, list[Array]]:
        """The message that has a verifier begin, or go on. defaults: the model's own."""
        submit = Submit(request=self.number, sampling=self.sampling.over(defaults))
        return submit, [np.asarray(self.prompt, np.int32), np.asarray(self.answer, np.int32)]


class Flights(dict[int, Flight]):
    """The requests under way, by their number."""

    def hear(self, number: int, arrival: Tokens | TalonError) -> None:
        """What is for a request that has ended, or that nobody knows, is dropped."""
        if (flight := self.get(number)) is not None and not flight.ended:
            flight.hear(arrival)

    def fail(self, error: TalonError) -> None:
        """All of them end with that error."""
        for flight in self.values():
            flight.hear(error)

    def without(self, verifier: str) -> list[Flight]:
        """Those that go on and that the verifier of that name does not have."""
        return [flight for flight in self.values() if flight.verifier != verifier and not flight.ended]

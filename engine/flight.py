"""A request as the front end knows it: everything that a new verifier needs to go on where the last one stopped."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from engine.errors import TalonError, WorkerDied
from engine.messages import Array, Submit, Tokens
from engine.sampling import SamplingParams

_SUSPECTED = 2  # verifiers that died with a request before it had a token of theirs
_GIVEN_UP = 5  # such verifiers in a row


@dataclass
class Flight:
    """verifier: the worker that has the request, "" while none has. answer: the tokens heard of so far. lost: verifiers
    in a row that died with it, none of which had emitted a token for it since the one before.
    """

    number: int
    prompt: list[int]
    sampling: SamplingParams
    arrivals: asyncio.Queue[Tokens | TalonError] = field(default_factory=asyncio.Queue)
    answer: list[int] = field(default_factory=list)
    verifier: str = ""
    ended: bool = False
    lost: int = 0

    @property
    def suspected(self) -> bool:
        """Whether it may be what ends verifiers."""
        return self.lost >= _SUSPECTED and not self.ended

    def hear(self, arrival: Tokens | TalonError) -> None:
        """Take in what a round emitted, or why there will be no more."""
        if isinstance(arrival, Tokens):
            self.lost = 0
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

    def due(self, verifier: str) -> list[Flight]:
        """Those to be handed to the verifier of that name now. One that may have ended others goes before the rest, and
        by itself: should it end this one too, it is known which it was.
        """
        suspects = [flight for flight in self.values() if flight.suspected]
        if any(flight.verifier == verifier for flight in suspects):
            return []
        waiting = [flight for flight in self.values() if flight.verifier != verifier and not flight.ended]
        return suspects[:1] or waiting

    def lose(self, verifier: str) -> None:
        """The verifier of that name has died. A request that ends every verifier fails; the others go on."""
        for flight in self.values():
            if flight.verifier == verifier and not flight.ended:
                flight.lost += 1
                if flight.lost == _GIVEN_UP:
                    flight.hear(
                        WorkerDied(f"{_GIVEN_UP} verifiers in a row died with this request before it had a token")
                    )

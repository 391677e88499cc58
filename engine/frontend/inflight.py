"""A request as the front end knows it: everything that a new verifier needs to continue where the last one stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.core.errors import RequestFailed, TalonError, WorkerDied, first_line
from engine.core.params import SamplingParams
from engine.wire.messages import Array, PromptProgress, Submit, Tokens

_SUSPECTED = 2  # a request is suspected once this many verifiers died with it before emitting a token for it
_GIVEN_UP = 5  # a request fails once this many such verifiers died in a row


@dataclass
class InflightRequest:
    """A request that is not answered yet.

    on_progress: called with how far the prompt is, while it is read in several forwards; progress: the latest of these,
    None once the answer has begun. verifier: the worker that has the request, "" while none has it. answer: the tokens
    received so far. lost: consecutive verifiers that died with the request without emitting a token for it.
    """

    number: int
    prompt: list[int]
    sampling: SamplingParams
    on_progress: Callable[[PromptProgress], None] | None = None
    arrivals: asyncio.Queue[Tokens | TalonError] = field(default_factory=asyncio.Queue)
    answer: list[int] = field(default_factory=list)
    progress: PromptProgress | None = None
    verifier: str = ""
    ended: bool = False
    lost: int = 0

    @property
    def suspected(self) -> bool:
        """Whether this request may be what kills verifiers."""
        return self.lost >= _SUSPECTED and not self.ended

    def deliver(self, arrival: Tokens | TalonError) -> None:
        """Receive what a round emitted, or why there will be no more."""
        self.progress = None
        if isinstance(arrival, Tokens):
            self.lost = 0
            self.answer += arrival.tokens
            self.ended = arrival.finish_reason is not None
        else:
            self.ended = True
        self.arrivals.put_nowait(arrival)

    def note(self, progress: PromptProgress) -> None:
        """Receive how far the prompt is. An error of the caller's `on_progress` ends this request alone."""
        self.progress = progress
        if self.on_progress is not None:
            try:
                self.on_progress(progress)
            except Exception as error:
                self.deliver(RequestFailed(f"on_progress: {first_line(error)}"))

    def submission(self, defaults: SamplingParams) -> tuple[Submit, list[Array]]:
        """Make the message that starts or continues the request in a verifier. defaults: the model's own."""
        submit = Submit(request=self.number, sampling=self.sampling.over(defaults))
        return submit, [np.asarray(self.prompt, np.int32), np.asarray(self.answer, np.int32)]


class InflightRequests(dict[int, InflightRequest]):
    """The requests in flight, by their number."""

    def deliver(self, number: int, arrival: Tokens | TalonError) -> None:
        """Pass on what a round emitted. Messages for a request that has ended or is unknown are dropped."""
        if (request := self.get(number)) is not None and not request.ended:
            request.deliver(arrival)

    def note(self, progress: PromptProgress) -> None:
        """Pass on how far a prompt is."""
        if (request := self.get(progress.request)) is not None and not request.ended:
            request.note(progress)

    def fail(self, error: TalonError) -> None:
        """End all requests with that error."""
        for request in self.values():
            request.deliver(error)

    def due(self, verifier: str) -> list[InflightRequest]:
        """Return the requests to submit to the verifier of that name now. A suspected request goes first and by itself:
        if it kills this verifier too, the culprit is known.
        """
        suspects = [request for request in self.values() if request.suspected]
        if any(request.verifier == verifier for request in suspects):
            return []
        waiting = [request for request in self.values() if request.verifier != verifier and not request.ended]
        return suspects[:1] or waiting

    def lose(self, verifier: str) -> None:
        """Take back the requests of the verifier of that name, which has died. A request that kills every verifier
        fails; the others continue.
        """
        for request in self.values():
            if request.verifier == verifier and not request.ended:
                request.lost += 1
                if request.lost == _GIVEN_UP:
                    request.deliver(
                        WorkerDied(f"{_GIVEN_UP} verifiers in a row died with this request before it had a token")
                    )

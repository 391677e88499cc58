"""Rounds of plain decoding as the verifier runs them, of a model of which only the speed matters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from engine.config import load
from engine.core.params import SamplingParams
from engine.model.runner import Runner
from engine.model.target import Target
from engine.placement import Threads
from engine.verifier.loop import Verifier
from engine.verifier.request import Request

_PROMPT, _ROOM = 16, 64  # tokens of each prompt, which fill a block, and of its answer
M = TypeVar("M")


class _Silent:
    """A line on which nothing comes and nobody listens."""

    malformed, in_process = 0, True

    def send(self, *_: Any) -> bool:
        return True


class _Model(Runner):
    """A target without a tokenizer."""

    eos_tokens: frozenset[int] = frozenset()

    def __init__(self, runner: Runner):
        super().__init__(runner.forward, runner.pool, runner.vocab_size, runner.dtype)
        assert runner.pool is not None
        self.device = runner.pool.keys.device


class PlainRounds:
    """Requests whose prompts are read, and of which a round of plain decoding is under way."""

    def __init__(self, runner: Runner, requests: int, temperature: float):
        target, line = cast(Target, _Model(runner)), cast(Any, _Silent())
        config = load({"model": "none", "method": "none"}, {"verifier.max_running": requests})
        self.verifier = Verifier(config, target, line, line, Threads(1, 1, 1))
        sampling = SamplingParams(temperature=temperature, max_tokens=_ROOM)
        for number in range(requests):
            prompt = [3 + number] * _PROMPT
            self.verifier.scheduler.waiting.append(Request(number, prompt, [], sampling, target, 0))
        for _ in range(3):
            self._step()

    def measure(self, measuring: Callable[[], AbstractContextManager[M]], rounds: int) -> M:
        """Measure so many rounds together. Each of them has been launched before the one before it was read."""
        with measuring() as found:
            for _ in range(rounds):
                self._step()
                if not self.verifier.ahead.queued:
                    raise RuntimeError("a round was not launched before the one before it was read")
        return found

    def _step(self) -> None:
        self.verifier._step(self.verifier._plan())

    def close(self) -> None:
        for request in [*self.verifier.scheduler]:
            self.verifier._forget(request)

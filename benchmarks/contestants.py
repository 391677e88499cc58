"""What is compared: Talon's methods, and `transformers` itself on the same weights, type and threads."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from engine.api import Engine
from engine.config import Config
from engine.messages import Tokens
from engine.sampling import SamplingParams
from engine.target import Target
from engine.worker import share_cores


class Run(msgspec.Struct, frozen=True):
    """One answer and what it took. seconds: from the call to the last token."""

    token_ids: list[int]
    seconds: float
    rounds: int
    mean_accepted_tokens: float
    time_to_first_token_s: float
    verifier_busy: float | None
    draft_hit_rate: float | None
    log: list[Tokens]


class Contestant(Protocol):
    """Answers one prompt (token ids) at a time."""

    async def answer(self, prompt: list[int], sampling: SamplingParams) -> Run: ...

    async def close(self) -> None: ...


class TalonContestant:
    """An engine with one method."""

    def __init__(self, engine: Engine):
        self.engine = engine

    @classmethod
    async def start(cls, config: Config) -> TalonContestant:
        return cls(await Engine.start(config))

    async def answer(self, prompt: list[int], sampling: SamplingParams) -> Run:
        started = time.perf_counter()
        result = await self.engine.generate(prompt, sampling)
        metrics = result.metrics
        return Run(
            result.token_ids,
            time.perf_counter() - started,
            metrics.rounds,
            metrics.mean_accepted_tokens,
            metrics.time_to_first_token_s,
            metrics.verifier_busy,
            metrics.draft_hit_rate,
            result.rounds,
        )

    async def close(self) -> None:
        await self.engine.close()


class TransformersContestant:
    """`model.generate` on a thread of its own, with as many torch threads as Talon's verifier has."""

    def __init__(self, model: Any, threads: int):
        self.model = model
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))

    @classmethod
    async def start(cls, config: Config) -> TransformersContestant:
        def load() -> Any:  # as its own users would: without our CPU layout of the weights
            dtype = Target.load(config.model, config.dtype, config.device).dtype
            return AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype).eval()

        model = await asyncio.to_thread(load)
        return cls(model, share_cores(config.model_copy(update={"method": "none"})).verifier_alone)

    async def answer(self, prompt: list[int], sampling: SamplingParams) -> Run:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, prompt, sampling)

    def _answer(self, prompt: list[int], sampling: SamplingParams) -> Run:
        torch.manual_seed(sampling.seed)
        clock = _FirstToken()
        started = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(
                torch.tensor([prompt], device=self.model.device),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=self.model.device),
                max_new_tokens=sampling.max_tokens,
                do_sample=sampling.temperature > 0,
                temperature=sampling.temperature or None,
                top_k=sampling.top_k or None,
                top_p=sampling.top_p,
                streamer=clock,
            )
        tokens = output[0, len(prompt) :].tolist()
        ended = time.perf_counter()
        return Run(tokens, ended - started, len(tokens) - 1, 1.0, clock.first_s - started, None, None, [])

    async def close(self) -> None:
        self._thread.shutdown()


class _FirstToken:
    """A `transformers` streamer that notes when the first token came; the first call hands over the prompt."""

    def __init__(self) -> None:
        self.calls, self.first_s = 0, 0.0

    def put(self, tokens: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first_s = time.perf_counter()

    def end(self) -> None:
        """Nothing to do."""


async def start_contestant(method: str, config: Config) -> Contestant:
    """The contestant named `method`: a Talon method, or `hf` for plain `transformers`."""
    if method == "hf":
        return await TransformersContestant.start(config)
    return await TalonContestant.start(config.model_copy(update={"method": method}))


def overhead_us(run: Run) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Per round: microseconds in which neither target nor draft model computed."""
    return np.array([r.round_us - r.forward_us - r.draft_us for r in run.log[1:]], dtype=np.int64)

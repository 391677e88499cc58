"""transformers' own decoding, plain, assisted and with prompt lookup, as contestants."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import GenerationConfig

from engine.config import Config
from engine.core.params import SamplingParams, left_open, own_defaults
from engine.model.loading import dtype_of, find_device, load_model, name_of
from engine.placement import share_cores

from .timed_answer import TimedAnswer


class TransformersContestant:
    """`model.generate` on a thread of its own, with the threads of a verifier that shares the cores with nobody."""

    context = None

    def __init__(self, model: Any, threads: int, options: dict[str, Any]):
        self.model, self.options = model, options
        self.defaults = own_defaults(left_open(model.generation_config), model.name_or_path)
        model.generation_config = end_of_answers(model.generation_config)
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))

    @classmethod
    async def start(
        cls, config: Config, assistant: str | None = None, prompt_lookup: bool = False
    ) -> TransformersContestant:
        # loaded as its own users would: without our CPU layout of the weights
        def load() -> tuple[Any, dict[str, Any]]:
            device, dtype = find_device(config.device), dtype_of(config)

            def read(name: str) -> Any:
                return load_model(name, name_of(dtype), device).eval()

            model = read(config.model)
            if assistant is not None:
                return model, {"assistant_model": read(assistant)}
            return model, {"prompt_lookup_num_tokens": 10} if prompt_lookup else {}

        model, options = await asyncio.to_thread(load)
        return cls(model, share_cores(config.model_copy(update={"method": "none"})).verifier_alone, options)

    async def answer(self, prompt: list[int], sampling: SamplingParams) -> TimedAnswer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, prompt, sampling)

    def _answer(self, prompt: list[int], sampling: SamplingParams) -> TimedAnswer:
        torch.manual_seed(sampling.seed)
        sampling = sampling.over(self.defaults)
        truncation: dict[str, Any] = {}
        if sampling.temperature > 0:  # for transformers top_k=None means 50
            truncation = {"top_k": sampling.top_k or 0, "top_p": sampling.top_p, "min_p": sampling.min_p}
        clock = _Clock() if "assistant_model" not in self.options else None
        started = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(
                torch.tensor([prompt], device=self.model.device),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=self.model.device),
                max_new_tokens=sampling.max_tokens,
                do_sample=sampling.temperature > 0,
                temperature=sampling.temperature or None,
                repetition_penalty=sampling.repetition_penalty,
                min_new_tokens=sampling.min_tokens or None,
                streamer=clock,
                **truncation,
                **self.options,
            )
        tokens = output[0, len(prompt) :].tolist()
        ended = time.perf_counter()
        first_s = clock.arrivals[1][0] - started if clock is not None else None
        token_ms = clock.token_ms() if clock is not None else []
        return TimedAnswer(tokens, ended - started, None, None, first_s, None, None, [], token_ms)

    def peak_memory_mb(self) -> float | None:
        return None  # it lives in the benchmark's own process, with the others of its kind

    async def close(self) -> None:
        self._thread.shutdown()
        self.model, self.options = None, {}  # the next model may need the memory


def end_of_answers(stored: GenerationConfig) -> GenerationConfig:
    """Return what ends an answer, from a model's generation_config.json. All else is set explicitly, as for Talon: the
    two are compared on what both can do.
    """
    return GenerationConfig(
        bos_token_id=stored.bos_token_id, eos_token_id=stored.eos_token_id, pad_token_id=stored.pad_token_id
    )


class _Clock:
    """A `transformers` streamer that notes when tokens came, and how many; the first call hands over the prompt."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []

    def put(self, tokens: Any) -> None:
        self.arrivals.append((time.perf_counter(), tokens.numel()))

    def token_ms(self) -> list[float]:
        """Return token_ms of `TimedAnswer`."""
        pairs = zip(self.arrivals[1:], self.arrivals[2:], strict=False)
        return [1000 * (now - before) / count for (before, _), (now, count) in pairs for _ in range(count)]

    def end(self) -> None:
        """Do nothing."""

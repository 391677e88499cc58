"""What is compared: Talon's methods, and `transformers` itself on the same weights, type and threads."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console

from engine.api import Engine
from engine.config import Config, load
from engine.core.errors import ConfigError, TalonError, did_you_mean
from engine.core.methods import METHODS
from engine.core.params import SamplingParams
from engine.frontend.processes import ProcessWorker
from engine.text.encode import encode_text
from engine.weights.tokenizer import tokenizer_of

from ..report.figures import PLAIN, TRANSFORMERS
from .memory import peak_rss_mb
from .timed_answer import TimedAnswer

# The answer that every contestant gives before it is measured, as a first request compiles.
WARM_UP_PROMPT = "Say hello."
WARM_UP_SAMPLING = SamplingParams(max_tokens=24)


class Contestant(Protocol):
    """Answers one prompt (token ids) at a time."""

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and answer, None where a prompt that is too long is not refused."""

    async def answer(self, prompt: list[int], sampling: SamplingParams) -> TimedAnswer: ...

    def peak_memory_mb(self) -> float | None:
        """Peak memory of its own processes so far, None where that is unknown."""

    async def close(self) -> None: ...


class TalonContestant:
    """An engine with one configuration."""

    def __init__(self, engine: Engine):
        self.engine = engine

    @classmethod
    async def start(cls, config: Config) -> TalonContestant:
        return cls(await Engine.start(config))

    @property
    def context(self) -> int:
        return self.engine.target.context

    async def answer(self, prompt: list[int], sampling: SamplingParams) -> TimedAnswer:
        started = time.perf_counter()
        result = await self.engine.generate(prompt, sampling)
        metrics = result.metrics
        return TimedAnswer(
            result.token_ids,
            time.perf_counter() - started,
            metrics.rounds,
            metrics.mean_accepted_tokens,
            metrics.time_to_first_token_s,
            metrics.verifier_busy,
            metrics.draft_hit_rate,
            result.rounds,
            [r.round_us / 1000 / len(r.tokens) for r in result.rounds[1:] for _ in r.tokens],
            metrics.exact,
            metrics.inexact,
            metrics.cached_tokens,
            metrics.activations,
            metrics.weights,
        )

    def peak_memory_mb(self) -> float | None:
        workers = self.engine._workers.running.values()
        peaks = [peak_rss_mb(worker.pid) for worker in workers if isinstance(worker, ProcessWorker)]
        known = [peak for peak in peaks if peak is not None]
        return sum(known) if known else None

    async def close(self) -> None:
        await self.engine.close()


AS_PUBLISHED: dict[str, Any] = {
    "drafter.shared_noise": False,
    "drafter.answers": None,
    "verifier.cut": False,
    "mode": "sequential",
}

CONTESTANTS: dict[str, dict[str, Any]] = {name: AS_PUBLISHED | {"method": name} for name in METHODS} | {
    "lookahead": AS_PUBLISHED | {"method": "lookahead", "drafter.budget": 121},
    "suffix": AS_PUBLISHED | {"method": "suffix", "drafter.budget": 32},
    "datastore": AS_PUBLISHED | {"method": "datastore", "drafter.budget": 64},
    "recycling": AS_PUBLISHED | {"method": "recycling", "drafter.budget": 81},
    "medusa": AS_PUBLISHED | {"method": "medusa", "drafter.growth.policy": "published", "drafter.budget": 64},
    "hydra": AS_PUBLISHED | {"method": "hydra", "drafter.growth.policy": "published", "drafter.budget": 64},
    "eagle": AS_PUBLISHED | {"method": "eagle", "drafter.growth.policy": "published"},
    "eagle2": AS_PUBLISHED | {"method": "eagle", "drafter.growth.policy": "dynamic"},
    "eagle3": AS_PUBLISHED | {"method": "eagle3", "drafter.growth.policy": "dynamic"},
    "talon-tree": AS_PUBLISHED | {"method": "eagle3", "drafter.growth.policy": "talon"},
    "block": AS_PUBLISHED | {"method": "block", "drafter.growth.policy": "dynamic"},
    "talon-pld": {"method": "pld", "mode": "sequential"},
    "talon-suffix": {"method": "suffix", "mode": "sequential"},
    "talon-session": {"method": "suffix", "mode": "sequential", "drafter.answers": None},
    "talon-datastore": {"method": "datastore", "mode": "sequential"},
    "talon-block": {"method": "block", "mode": "sequential"},
    "talon-eagle3": {"method": "eagle3", "mode": "sequential"},
    "hybrid": {"method": "hybrid", "mode": "sequential"},
    "talon": {"method": "hybrid", "mode": "auto"},
    # What each of our parts adds to eagle3.
    "+adaptive": AS_PUBLISHED | {"method": "eagle3", "drafter.growth.policy": "adaptive"},
    "+noise": {"method": "eagle3", "mode": "sequential", "verifier.cut": False},
    "+calibration": {"method": "hybrid", "drafter.memories": [], "mode": "sequential", "verifier.cut": False},
    "+merge": {"method": "hybrid", "mode": "sequential", "verifier.cut": False},
    "+budget": {"method": "hybrid", "mode": "sequential"},
    "+async": {"method": "hybrid", "mode": "async"},
}
"""What each name stands for: configuration keys. Baselines run as published: their trees, no calibration, no shared
noise, no initial answers, every node verified; talon-pld, talon-suffix, talon-datastore, talon-block and talon-eagle3
draft and verify what pays, as they are served; talon-session is talon-suffix without initial answers."""

ABLATION = ("eagle3", "+adaptive", "+noise", "+calibration", "+merge", "+budget", "+async")


def every() -> list[str]:
    """Return all contestants but the steps of the ablation."""
    return [name for name in CONTESTANTS if not name.startswith("+")] + list(TRANSFORMERS)


def check_name(name: str) -> None:
    """Raise ConfigError unless there is such a contestant."""
    if name not in CONTESTANTS and name not in TRANSFORMERS:
        known = [*CONTESTANTS, *TRANSFORMERS]
        meant = did_you_mean(name, known) or ";"
        raise ConfigError(f"method={name!r}: no such contestant{meant} known: {', '.join(known)}")


def keys_of(name: str, as_served: bool = False) -> dict[str, Any]:
    """Return the configuration keys that a contestant stands for; of a method as served it is the method alone."""
    return {"method": name} if as_served and name in METHODS else CONTESTANTS[name]


def without_effect(names: Sequence[str], given: Mapping[str, Any], as_served: bool) -> list[str]:
    """Return a line for each key that the user gives and that contestants define otherwise."""
    lines, fixed = [], {name: keys_of(name, as_served) for name in names if name in CONTESTANTS}
    for key, value in given.items():
        others = [name for name, keys in fixed.items() if keys["method"] != "none" and keys.get(key, value) != value]
        if others:
            lines.append(f"--set {key}={value} does not apply to {', '.join(others)}: their definition has its own")
    return lines


async def start_contestant(name: str, config: Config, heads: Path | None = None) -> Contestant:
    """Start the contestant `name`, on the model of `config`. heads: a folder with eagle, eagle3, medusa, hydra and sps;
    None: drafter.path names their weights.
    """
    if name in TRANSFORMERS:
        assistant = None
        if name == "hf-assisted":
            assistant = config.drafter.weights("sps") if heads is None else str(heads / "sps")
            if assistant is None:
                raise ConfigError("hf-assisted: needs a small model: give drafter.path, or --heads DIR with sps in it")
        from .transformers_baseline import TransformersContestant

        return await TransformersContestant.start(config, assistant, prompt_lookup=name == "hf-pld")
    check_name(name)
    settings = load(config, keys_of(name))
    if heads is not None:
        settings = load(settings, {"drafter.path": str(heads / "{method}"), "drafter.tuned": None})
    return await TalonContestant.start(settings)


class Closeable(Protocol):
    async def close(self) -> None: ...


Started = TypeVar("Started", bound=Closeable)


async def start_each(
    names: Sequence[str],
    start: Callable[[str], Awaitable[Started]],
    warm_up: Callable[[Started], Awaitable[Any]],
    console: Console,
) -> dict[str, Started]:
    """Start and warm up what can be started here; for the others, a line says what they lack. Plain decoding's error is
    raised, and what was started by then is closed.
    """
    started: dict[str, Started] = {}
    try:
        for name in names:
            try:
                started[name] = await start(name)
                await warm_up(started[name])
            except TalonError as error:
                if name == PLAIN:
                    raise
                if name in started:
                    await started.pop(name).close()
                console.print(f"left out: {name}: {error}", markup=False)
        others = [name for name in names if name != PLAIN]
        if others and not any(name in started for name in others):
            raise ConfigError(f"methods: none of {', '.join(others)} can be started here, see above")
    except BaseException:
        for one in started.values():
            await one.close()
        raise
    return started


def warm_up_prompt(config: Config) -> list[int]:
    """Return the prompt's token ids. config: resolved."""
    return encode_text(tokenizer_of(config), WARM_UP_PROMPT)


async def start_contestants(
    names: Sequence[str], config: Config, heads: Path | None, warm_up: list[int], console: Console
) -> dict[str, Contestant]:
    """Start the contestants that can be started here. warm_up: a prompt."""

    async def start(name: str) -> Contestant:
        return await start_contestant(name, config, heads)

    return await start_each(names, start, lambda one: one.answer(warm_up, WARM_UP_SAMPLING), console)

"""The async API. The event loop only moves messages; models live in the workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import anyio
import anyio.to_thread
import numpy as np
import zmq
import zmq.asyncio

from drafters.registry import find
from engine import config as configuration
from engine import errors
from engine.answer import Answer, Piece, Result
from engine.config import Config
from engine.errors import EngineClosed, QueueFull, RequestError, TalonError, WorkerDied
from engine.flight import Flight
from engine.launch import STOP_S, Workers
from engine.matcher import check
from engine.messages import Cancel, Failed, Heartbeat, Ready, Spans, Stop, Tokens
from engine.model.resolve import resolved
from engine.sampling import SamplingParams
from engine.text import TextStream, encode_text, load_tokenizer
from engine.totals import Totals
from engine.trace import Timeline
from engine.transport import Hub
from engine.worker import oversubscription

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
FROM_WORKERS = (Ready, Tokens, Failed, Heartbeat, Spans)
_WATCH_S = 0.05
_TRIES = 3  # of starting a worker again in a row
_BARREN = 5  # verifiers in a row that emit nothing
_LAST_WORDS_S = 0.2  # in which what a worker said before it ended arrives
_ABSENT_S = 0.5  # the loop stood still, and the workers maybe with it (a frozen container): silence says nothing


class Stream:
    """An answer under way: iterate over its pieces; `result` is there when the iteration has ended.

    `async with engine.stream(...) as stream` cancels the request when the block is left, be it early. Without it a
    `break` only pauses the iteration: the request runs on until `aclose`, or until the stream is garbage.
    """

    def __init__(self, engine: Engine, prompt: Prompt, sampling: SamplingParams, raw: bool):
        self._pieces = engine._answer(self, prompt, sampling, raw)
        self.result: Result | None = None

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces

    async def aclose(self) -> None:
        """Cancel the request; harmless if it has ended."""
        await self._pieces.aclose()


class Engine:
    """`async with await Engine.start(config) as engine: ...`"""

    def __init__(self, config: Config):
        self.config = config
        self._context = zmq.asyncio.Context()
        self._workers = Workers(config, zmq.Context.shadow(self._context))
        self._hub = Hub(self._context, self._workers.control, FROM_WORKERS)
        self.timeline = Timeline(f"{config.method}, {config.mode}{config.simulation}")
        self.totals = Totals()
        self._tokenizer: Any = None
        self._target = Ready()
        self._ready: dict[str, asyncio.Event] = {role: asyncio.Event() for role in self._workers.roles}
        self._numbers = itertools.count(1)
        self._flights: dict[int, Flight] = {}
        self._places = anyio.CapacityLimiter(config.queue.size)
        self._tasks: list[asyncio.Task[None]] = []
        self._said: dict[str, TalonError] = {}  # why a worker could not start, by role
        self._failed_starts: Counter[str] = Counter()  # in a row, by role
        self._barren = 0  # verifiers in a row that died with requests and emitted no token
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._failed: TalonError | None = None

    @classmethod
    async def start(
        cls, config: str | Path | Mapping[str, Any] | Config = configuration.DEMO, **overrides: Any
    ) -> Engine:
        """Load the model and start the workers. Overrides name configuration keys: `method="pld"`.

        Raises ConfigError, ModelError or DrafterMismatch, each one line that says what to change.
        """
        settings = configuration.load(config, overrides)
        find(settings.method)  # refused before a model is downloaded
        engine = cls(await anyio.to_thread.run_sync(resolved, settings))
        try:
            if engine.config.trace is not None:  # that it cannot be written is not to be found out at the end
                engine.timeline.write(Path(engine.config.trace))
            await engine._launch()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None, *, raw: bool = False) -> Result:
        """Answer `prompt`: text (one user message, unless `raw`), chat messages, or token ids as they are.

        Cancelling the task cancels the request. Raises RequestError, QueueFull, WorkerDied or EngineClosed.
        """
        async with self.stream(prompt, sampling, raw=raw) as stream:
            async for _ in stream:
                pass
        assert stream.result is not None
        return stream.result

    async def generate_choices(
        self, prompt: Prompt, n: int, sampling: SamplingParams | None = None, *, raw: bool = False
    ) -> list[Result]:
        """`n` answers to one prompt at once, with seeds that count on from `sampling.seed`; they share its blocks."""
        if not _is_integer(n) or n < 1:
            raise RequestError(f"n={n!r}: ask for one answer or more")
        sampling = (sampling or SamplingParams()).validate()
        tasks = [asyncio.ensure_future(self.generate(prompt, sampling.of_choice(i), raw=raw)) for i in range(n)]
        try:
            return await asyncio.gather(*tasks)
        finally:  # one that fails, or a caller who leaves, ends them all
            await _cancel(tasks)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, *, raw: bool = False) -> Stream:
        """As `generate`, piece by piece: `async with engine.stream(...) as stream: async for piece in stream: ...`.

        Leaving the `async with` cancels a request that has not ended.
        """
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling={sampling!r}: give SamplingParams(max_tokens=...)")
        return Stream(self, prompt, sampling.validate(), raw)

    async def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """The token ids that `generate` would make of a prompt, refused if they leave no room for an answer."""
        tokens = await anyio.to_thread.run_sync(self._encode, prompt, raw)
        self._check_room(tokens, SamplingParams(max_tokens=1))
        return tokens

    @property
    def tokenizer(self) -> Any:
        """The target's, of `transformers`."""
        return self._tokenizer

    @property
    def target(self) -> Ready:
        """What the verifier says of its target: the size of its vocabulary and context, whether it is exact."""
        return self._target

    @property
    def ready(self) -> bool:
        """Whether a request would begin now. While a verifier is started again, requests under way wait for it."""
        return self._ready["verifier"].is_set() and not self._closed and self._failed is None

    @property
    def failed(self) -> TalonError | None:
        """Why the engine cannot go on, if so: only a new one helps."""
        return self._failed

    @property
    def requests(self) -> int:
        """Requests accepted and not answered yet, and those that wait for a place in the queue."""
        return len(self._flights) + self._places.statistics().tasks_waiting

    async def close(self) -> None:
        """End every request with EngineClosed, stop the workers, remove what they left."""
        if self._closed:
            return
        self._closed = True
        self._fail_all(EngineClosed("the engine was closed"))
        with anyio.CancelScope(shield=True):
            listener, others = self._tasks[:1], self._tasks[1:]  # the workers' last words are still heard
            await _cancel(others)
            self._stop_workers()
            for role in list(self._workers.running):
                patience_s = STOP_S if self._hears(role) else 0.0
                await anyio.to_thread.run_sync(self._workers.end, role, patience_s)
            if self.config.trace is not None:
                await asyncio.sleep(0.05)  # the workers' last spans
            await _cancel(listener)
            self._hub.close()
            self._context.term()
            self._workers.close()
        if self.config.trace is not None:
            self.timeline.write(Path(self.config.trace))

    def _abandoned(self) -> None:
        """The event loop ends, and nobody has closed the engine. What it holds would stop the garbage collector later:
        a ZeroMQ context waits for its sockets.
        """
        print("talon: the engine was not closed; use `async with await Engine.start(...)`", file=sys.stderr)
        self._closed = True
        self._fail_all(EngineClosed("its event loop has ended"))
        self._stop_workers()
        for role in list(self._workers.running):
            self._workers.end(role, STOP_S)
        self._hub.close()
        self._context.term()
        self._workers.close()

    def _hears(self, role: str) -> bool:
        """Whether the worker will end when told to. A process that still loads does not, and has nothing to save."""
        return self._ready[role].is_set() or self.config.transport == "inproc"

    def _stop_workers(self) -> None:
        for worker in self._workers.running.values():
            self._hub.send(worker.name, Stop())

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # A request's life.

    async def _answer(
        self, stream: Stream, prompt: Prompt, sampling: SamplingParams, raw: bool
    ) -> AsyncGenerator[Piece]:
        self._check_open()
        started = time.perf_counter()
        tokens = await anyio.to_thread.run_sync(self._encode, prompt, raw)
        self._check_room(tokens, sampling)
        self._check_say(sampling)
        if sampling.grammar is not None:
            await anyio.to_thread.run_sync(check, sampling.grammar)
        if self.config.queue.full == "refuse" and not self._places.available_tokens:
            raise QueueFull(f"queue.size={self.config.queue.size}: all places are taken; try later or raise it")
        number = next(self._numbers)
        async with self._places_for(number):
            self._check_open()  # after every wait: close() reaches only the requests in _flights
            flight = self._flights[number] = Flight(number, tokens, sampling)
            self.totals.prompt_tokens += len(tokens)
            try:
                if self._ready["verifier"].is_set():  # otherwise it is submitted when one is
                    self._submit(flight)
                text = TextStream(self._tokenizer, sampling.stop)
                answer = Answer(text, len(tokens), started, self._target.inexact, sampling)
                while answer.finish_reason is None:
                    arrival = await flight.arrivals.get()
                    if isinstance(arrival, TalonError):
                        raise arrival
                    piece = answer.add(arrival)
                    if piece.text or piece.token_ids:
                        yield piece
                stream.result = answer.result()
            finally:
                del self._flights[number]
                if not self._closed and flight.verifier:
                    self._hub.send(flight.verifier, Cancel(request=number))

    def _submit(self, flight: Flight) -> None:
        flight.verifier = self._workers.running["verifier"].name
        self._hub.send(flight.verifier, *flight.submission(self._target.defaults))

    @contextlib.asynccontextmanager
    async def _places_for(self, number: int) -> AsyncIterator[None]:
        await self._places.acquire_on_behalf_of(number)
        try:
            yield
        finally:
            self._places.release_on_behalf_of(number)

    def _encode(self, prompt: Prompt, raw: bool) -> list[int]:
        if (tolist := getattr(prompt, "tolist", None)) is not None:  # an array or a tensor
            prompt = tolist()
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise RequestError(f"prompt: is a {type(prompt).__name__}; give text, chat messages or token ids")
        if not prompt:
            raise RequestError("prompt: is empty; give text, chat messages or token ids")
        vocabulary = self._target.vocab_size
        if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
            tokens = encode_text(self._tokenizer, prompt, raw)
            if (highest := max(tokens, default=0)) >= vocabulary:
                raise RequestError(
                    f"prompt: the tokenizer makes token {highest} of it, the model knows {vocabulary} tokens: resize "
                    "the model's embeddings to the tokenizer, or use the model's own tokenizer"
                )
            return tokens
        tokens = [int(t) for t in prompt if _is_integer(t) and 0 <= t < vocabulary]
        if len(tokens) < len(prompt):
            raise RequestError(f"prompt: holds something that is no token id; they go from 0 to {vocabulary - 1}")
        return tokens

    def _check_room(self, tokens: list[int], sampling: SamplingParams) -> None:
        if not tokens:
            raise RequestError("prompt: holds no tokens; give more text")
        context, left = self._target.context, self._target.context - len(tokens)
        if left < 1:
            raise RequestError(
                f"prompt: its {len(tokens)} tokens leave no room for an answer in the context of {context}; shorten it"
            )
        if sampling.max_tokens > left:
            raise RequestError(
                f"max_tokens={sampling.max_tokens}: with a prompt of {len(tokens)} tokens that is over the context of "
                f"{context}; shorten the prompt or ask for at most {left}"
            )

    def _check_say(self, sampling: SamplingParams) -> None:
        """Refuse what this engine's model or method cannot do."""
        vocabulary = self._target.vocab_size
        if not all(0 <= token < vocabulary for token in sampling.logit_bias):
            raise RequestError(f"logit_bias={sampling.logit_bias}: token ids go from 0 to {vocabulary - 1}")
        for field in ("logprobs", "prompt_logprobs"):
            if (getattr(sampling, field) or 0) > vocabulary:
                raise RequestError(f"{field}={getattr(sampling, field)}: the model knows {vocabulary} tokens")
        if (say := sampling.speculation) is None:
            return
        if say.method not in (None, self.config.method):
            raise RequestError(
                f'speculation.method={say.method!r}: this engine drafts with {self.config.method!r}; use that or "off"'
            )
        if say.budget is not None and say.budget > self.config.drafter.budget:
            raise RequestError(
                f"speculation.budget={say.budget}: is over the engine's drafter.budget={self.config.drafter.budget}"
            )

    def _check_open(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._closed:
            raise EngineClosed("the engine is closed; start a new one")
        if asyncio.get_running_loop() is not self._loop:  # what it waits for arrives in the other
            raise EngineClosed("the engine belongs to the event loop that started it; use it there or start a new one")

    def _fail_all(self, error: TalonError) -> None:
        for flight in self._flights.values():
            flight.hear(error)

    # Workers.

    async def _launch(self) -> None:
        if (warning := oversubscription(self.config)) is not None:
            print(f"talon: {warning}", file=sys.stderr)
        await anyio.to_thread.run_sync(self._workers.check)
        for role in self._workers.roles:
            self._workers.start(role)
        self._keep_running(self._listen())
        with anyio.move_on_after(self.config.start_timeout_s):
            self._tokenizer = await anyio.to_thread.run_sync(load_tokenizer, self.config.model)
            while not all(event.is_set() for event in self._ready.values()):
                for error in self._said.values():
                    raise error
                for role in self._workers.roles:
                    if not self._ready[role].is_set() and not self._workers.running[role].alive():
                        await asyncio.sleep(_LAST_WORDS_S)
                        raise self._said.get(role) or WorkerDied(f"the {role} died while loading {self.config.model}")
                await asyncio.sleep(0.01)
        if not all(event.is_set() for event in self._ready.values()):
            raise WorkerDied(f"start_timeout_s={self.config.start_timeout_s:g}: the workers were not ready in time")
        if not self._target.exact:
            _say_once(f"talon: the target is not exact, so drafts may turn a near tie: {self._target.inexact}")
        self._workers.stand_by()
        self._keep_running(self._watch())

    def _keep_running(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the engine closes; should it fail, so does every request, rather than wait forever."""

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                if not self._closed:
                    self._abandoned()
            elif (error := task.exception()) is not None:
                print(f"talon: {type(error).__name__}: {error}; the engine cannot go on", file=sys.stderr)
                self._give_up(EngineClosed(f"the engine failed: {error}; start a new one"))

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        self._tasks.append(task)

    async def _listen(self) -> None:
        """Hand what the workers say to the requests it is for."""
        while True:
            arrival = self._hub.open(await self._hub.socket.recv_multipart())  # type: ignore[misc]
            if arrival is None:
                continue
            name, message, _ = arrival
            role = name.partition("-")[0]
            if isinstance(message, Spans):  # its last ones come when it has ended
                self.timeline.add(role, message)
            if (worker := self._workers.running.get(role)) is None or worker.name != name:
                continue  # the last words of a worker already replaced
            self._workers.heard_s[role] = time.monotonic()
            if isinstance(message, Tokens):
                self._barren = 0
                self.totals.add(message)
                if (flight := self._flights.get(message.request)) is not None and not flight.ended:
                    flight.hear(message)
            elif isinstance(message, Failed):
                self._hear_failure(role, message)
            elif isinstance(message, Heartbeat) and role == "verifier":
                self.totals.state = message
            elif isinstance(message, Ready):
                self._ready[role].set()
                self._failed_starts[role] = 0
                if role == "verifier":
                    self._target = message
                    self.totals.new_verifier()
                    for flight in [f for f in self._flights.values() if f.verifier != name and not f.ended]:
                        self._submit(flight)

    def _hear_failure(self, role: str, message: Failed) -> None:
        kind = getattr(errors, message.kind, TalonError)
        error = kind(message.text) if issubclass(kind, TalonError) else TalonError(message.text)
        if message.request is None:
            self._said[role] = error
        elif (flight := self._flights.get(message.request)) is not None:
            flight.hear(error)

    async def _watch(self) -> None:
        """Replace workers that died or fell silent."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            now_s = time.monotonic()  # the only look at the clock: it may jump between two
            if now_s - looked_s > _ABSENT_S:
                self._workers.forgive_silence(now_s)
            looked_s = now_s
            self._hub.restore()
            for role in self._workers.roles:
                loading = not self._ready[role].is_set()
                config = self.config
                patience_s = config.start_timeout_s if loading else config.heartbeat_timeout_s
                if (reason := self._workers.dead(role, patience_s, now_s)) is not None:
                    await self._replace(role, reason)

    async def _replace(self, role: str, reason: str) -> None:
        """Start the worker again. Requests wait at the front end and go on with the new one."""
        loading = not self._ready[role].is_set()
        if loading and role not in self._said:
            await asyncio.sleep(_LAST_WORDS_S)
        self._ready[role].clear()
        delay_s = self._workers.back_off_s(role)
        if role == "verifier":
            self._stop_workers()
        await anyio.to_thread.run_sync(self._workers.end, role, 0.0)
        self._ready[role].clear()  # should it have said so before it died: from here on nobody hears it
        said = self._said.pop(role, None)
        self._failed_starts[role] += loading
        if self._failed_starts[role] >= _TRIES:
            why = f"the {role} cannot be started again: {said or reason}"
            if role == "verifier":
                self._give_up(WorkerDied(why))
            else:
                print(f"talon: {why}; answers go on without drafts", file=sys.stderr)
            return
        print(f"talon: the {role} {f'failed: {said}' if said else reason}; starting another", file=sys.stderr)
        if role == "verifier" and not loading:
            self._count_barren()
        await asyncio.sleep(delay_s)
        self._workers.start(role)
        if role == "verifier" and "drafter" in self._workers.roles:
            patience_s = STOP_S if self._hears("drafter") else 0.0
            await anyio.to_thread.run_sync(self._workers.end, "drafter", patience_s)
            self._ready["drafter"].clear()
            self._workers.start("drafter")

    def _count_barren(self) -> None:
        """A request that ends every verifier that gets it must not be handed to one after the other for ever."""
        self._barren += bool(self._flights)
        if self._barren >= _BARREN:
            self._barren = 0
            why = f"the verifier died {_BARREN} times in a row before it had emitted a token"
            self._fail_all(WorkerDied(f"{why}: one of the requests in flight may be the cause; send them one by one"))

    def _give_up(self, error: TalonError) -> None:
        """The engine cannot go on: requests in flight and later ones fail with the reason."""
        self._failed = error
        self._fail_all(error)


@functools.cache
def _say_once(line: str) -> None:
    """On standard error; a benchmark starts many engines of one target."""
    print(line, file=sys.stderr)


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

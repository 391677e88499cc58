"""The async API. The event loop only moves messages; models live in the workers."""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from drafters.registry import check_vocabulary
from engine import config as configuration
from engine.answer import Answer, Piece, Result
from engine.config import Config
from engine.core.errors import EngineClosed, RequestError, TalonError, shown
from engine.core.methods import find
from engine.core.params import SamplingParams
from engine.frontend.admission import QueuePlace, QueuePlaces, Reservation
from engine.frontend.inflight import InflightRequest, InflightRequests
from engine.frontend.processes import ProcessWorker, begin_imports
from engine.frontend.prompts import Prompt, check_room, check_sampling, encode_prompt, is_integer
from engine.frontend.supervisor import Supervisor, say_once
from engine.frontend.tasks import gather
from engine.placement import settled
from engine.sampling.matcher import check
from engine.text.chat import Rendering
from engine.text.stream import TextStream
from engine.weights.resolve import resolved, restore
from engine.weights.tokenizer import tokenizer_of
from engine.wire.messages import PromptProgress, Ready


class Stream:
    """An answer being generated: iterate over its pieces; `result` is set once the iteration has ended.

    `async with engine.stream(...) as stream` cancels the request when the block is left, even early. Without it,
    `break` only pauses the iteration: the request keeps running until `aclose`, or until the stream is
    garbage-collected.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        sampling: SamplingParams,
        raw: bool,
        places: Reservation | None,
        visible: Container[int] = (),
        on_progress: Callable[[PromptProgress], None] | None = None,
    ):
        self._pieces = engine._answer(self, prompt, sampling, raw, places, visible, on_progress)
        self._accepted = False
        self.result: Result | None = None

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        await self.accepted()
        piece = await anext(self._pieces)
        assert piece is not None
        return piece

    async def accepted(self) -> None:
        """Wait until the engine has accepted the request; raises what refuses it. The first piece comes later, once
        the prompt has been read.
        """
        if not self._accepted:
            self._accepted = True
            await anext(self._pieces)

    async def aclose(self) -> None:
        """Cancel the request; harmless if it has ended."""
        await self._pieces.aclose()


class Engine:
    """`async with await Engine.start(config) as engine: ...`"""

    def __init__(self, config: Config, first_verifier: ProcessWorker | None = None, given: Config | None = None):
        """Make an engine that `start` then starts. config: with all names resolved; given: what it was made of."""
        self.config = config
        self._inflight = InflightRequests()
        restore_models = functools.partial(restore, given or config, config)
        self._supervisor = Supervisor(config, self._inflight, first_verifier, restore_models)
        self._workers, self._ready = self._supervisor.workers, self._supervisor.ready
        self.timeline, self.totals = self._supervisor.timeline, self._supervisor.totals
        self._tokenizer: Any = None
        self._numbers = itertools.count(1)
        self._places = QueuePlaces(config.queue)
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def start(
        cls, config: str | Path | Mapping[str, Any] | Config = configuration.DEMO, **overrides: Any
    ) -> Engine:
        """Load the model and start the workers. Overrides name configuration keys: `method="pld"`.

        Raises ConfigError, ModelError or DrafterMismatch, each one line that says what to change.
        """
        settings = configuration.load(config, overrides)
        find(settings.method)  # an unknown method is refused before a model is downloaded
        verifier = begin_imports(settings)
        try:
            chosen, why = await anyio.to_thread.run_sync(lambda: settled(resolved(settings)))
            if verifier is not None and chosen.transport == "inproc":
                verifier.end(0)
                verifier = None
            engine = cls(chosen, verifier, settings)
        except BaseException:
            if verifier is not None:
                verifier.end(0)
            raise
        try:
            if why is not None:
                print(f"talon: {why}", file=sys.stderr)
            if engine.config.trace is not None:  # fail now, not at the end, if it cannot be written
                engine.timeline.write(Path(engine.config.trace))
            await engine._supervisor.launch(engine._load_tokenizer)
            engine._tell_of_endings(settings.model)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _load_tokenizer(self) -> None:
        self._tokenizer = await anyio.to_thread.run_sync(tokenizer_of, self.config)
        await anyio.to_thread.run_sync(check_vocabulary, self.config, self._tokenizer)
        if not self._tokenizer.chat_template:
            say_once(
                "talon: this model has no chat template: text is sent to it as it is, and chat messages are refused; "
                "set chat_template=FILE"
            )

    def _tell_of_endings(self, given: str) -> None:
        """Say where answers end, if that was gathered from a file, or if it is doubtful. given: the model as named."""
        token, ends = self._tokenizer.eos_token_id, self.target.eos_tokens
        if given.lower().endswith(".gguf"):
            named = [f"{shown(self._tokenizer.convert_ids_to_tokens(end))} ({end})" for end in ends]
            say_once(f"talon: model={given}: answers end at {' and '.join(named) or 'no token, only at max_tokens'}")
        if token is not None and token not in ends:
            say_once(
                f"talon: model={self.config.model}: answers end at the tokens {ends}, and not at the tokenizer's "
                f"eos_token, {shown(self._tokenizer.eos_token)} ({token}): if they run on, add it to eos_token_id in "
                "generation_config.json"
            )

    async def close(self) -> None:
        """End every request with EngineClosed, stop the workers, remove what they left."""
        if self._supervisor.closed:
            return
        self._inflight.fail(EngineClosed("the engine was closed"))
        with anyio.CancelScope(shield=True):
            await self._supervisor.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # Requests.

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        raw: bool = False,
        places: Reservation | None = None,
    ) -> Result:
        """Answer `prompt`: text (one user message, unless `raw`), chat messages, or token ids as they are.

        Cancelling the task cancels the request. places: a reservation, of which it takes one. Raises RequestError,
        QueueFull, WorkerDied or EngineClosed.
        """
        async with self.stream(prompt, sampling, raw=raw, places=places) as stream:
            async for _ in stream:
                pass
        assert stream.result is not None
        return stream.result

    async def generate_choices(
        self, prompt: Prompt, n: int, sampling: SamplingParams | None = None, *, raw: bool = False
    ) -> list[Result]:
        """Return `n` answers to one prompt at once, with consecutive seeds from `sampling.seed`; they
        share its blocks.
        """
        if not is_integer(n) or n < 1:
            raise RequestError(f"n={shown(n)}: ask for one answer or more")
        sampling = self.check(SamplingParams() if sampling is None else sampling)
        return await gather(self.generate(prompt, sampling.of_choice(i), raw=raw) for i in range(n))

    def check(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters with every value converted to its type. Raises RequestError for what is wrong, or what
        this engine cannot do. Takes milliseconds for a logit_bias of the whole vocabulary.
        """
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling={shown(sampling)}: give SamplingParams(max_tokens=...)")
        sampling = sampling.validate()
        check_sampling(sampling, self.config, self.target)
        return sampling

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        raw: bool = False,
        places: Reservation | None = None,
        visible: Container[int] = (),
        on_progress: Callable[[PromptProgress], None] | None = None,
        checked: bool = False,
    ) -> Stream:
        """Answer as `generate` does, piece by piece: `async with engine.stream(...) as stream: async for piece in
        stream: ...`.

        Leaving the `async with` cancels a request that has not ended. places: a reservation, of which it takes one.
        visible: special tokens that are part of the text. on_progress: called with how far a prompt is that is read in
        several forwards. checked: `sampling` is a choice of what `check` has returned.
        """
        sampling = SamplingParams() if sampling is None else sampling
        sampling = sampling if checked else self.check(sampling)
        return Stream(self, prompt, sampling, raw, places, visible, on_progress)

    def reserve(self, count: int) -> Reservation:
        """Take places in the queue before prompts are tokenised: `with engine.reserve(2) as places: ...`. Raises
        QueueFull, whatever `queue.full` says.
        """
        return self._places.reserve(count)

    def reserve_beyond(self) -> Reservation:
        """Return a place beyond the queue's, for a request that must not keep any other from its place."""
        return self._places.beyond()

    async def tokenize(self, prompt: Prompt, raw: bool = False, rendering: Rendering | None = None) -> list[int]:
        """Return the token ids that `generate` would make of a prompt, however long it is. rendering: of
        chat messages.
        """
        vocabulary = self.target.vocab_size
        return await anyio.to_thread.run_sync(encode_prompt, self._tokenizer, prompt, raw, vocabulary, rendering)

    async def encode(self, prompt: Prompt, raw: bool = False, rendering: Rendering | None = None) -> list[int]:
        """Return the token ids of `tokenize`. Refuses them if they leave no space for an answer."""
        tokens = await self.tokenize(prompt, raw, rendering)
        check_room(tokens, 1, self.target.context)
        return tokens

    async def _answer(
        self,
        stream: Stream,
        prompt: Prompt,
        sampling: SamplingParams,
        raw: bool,
        places: Reservation | None,
        visible: Container[int],
        on_progress: Callable[[PromptProgress], None] | None,
    ) -> AsyncGenerator[Piece | None]:
        """Live a request's life at the front end. Yields None once it is accepted, then its pieces."""
        self._check_open()
        started = time.perf_counter()
        place = self._place_at_once(places)
        try:  # not a context manager: an event loop that ends closes all generators, that one's before this
            tokens = await self.encode(prompt, raw)
            check_room(tokens, sampling.max_tokens, self.target.context)
            if sampling.grammar is not None:
                await anyio.to_thread.run_sync(check, sampling.grammar)
            place = place or await self._places.wait()
            self._check_open()  # after every wait: close() reaches only the requests in _inflight
            number = next(self._numbers)
            request = self._inflight[number] = InflightRequest(number, tokens, sampling, on_progress)
            self.totals.prompt_tokens += len(tokens)
            try:
                self._supervisor.hand_over()
                yield None
                text = TextStream(self._tokenizer, sampling.stop, before=tokens, visible=visible)
                answer = Answer(text, len(tokens), started, self.target, sampling)
                while answer.finish_reason is None:
                    arrival = await request.arrivals.get()
                    if isinstance(arrival, TalonError):
                        raise arrival
                    if not answer.rounds and sampling.prompt_logprobs is None:  # with these, all of it is read
                        self.totals.look_up(len(tokens), min(arrival.cached, len(tokens)))
                    piece = answer.add(arrival)
                    if piece.text or piece.token_ids:
                        yield piece
                stream.result = answer.result()
            finally:
                del self._inflight[number]
                self._supervisor.cancel(request)
        finally:
            if place is not None:
                self._places.leave(place)

    def _place_at_once(self, places: Reservation | None) -> QueuePlace | None:
        """Take a place before the prompt is tokenised, which may take seconds; None where requests wait for theirs:
        those that are wrong are refused without one.
        """
        if places is None and self._places.refuses:
            places = self._places.reserve(1)
        return None if places is None else places.take()

    def _check_open(self) -> None:
        if self.failed is not None:
            raise self.failed
        if self._supervisor.closed:
            raise EngineClosed("the engine is closed; start a new one")
        if asyncio.get_running_loop() is not self._loop:  # messages arrive in the other loop
            raise EngineClosed("the engine belongs to the event loop that started it; use it there or start a new one")

    # State.

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer: an `engine.text.tokenizer.Tokenizer`, or that of `transformers` where
        that does more.
        """
        return self._tokenizer

    @property
    def target(self) -> Ready:
        """The verifier's facts about its target: vocabulary size, context, whether it is exact."""
        return self._supervisor.target

    @property
    def ready(self) -> bool:
        """Whether a new request would start at once. While a verifier restarts, running requests wait for it."""
        return self._ready["verifier"].is_set() and not self._supervisor.closed and self.failed is None

    @property
    def failed(self) -> TalonError | None:
        """Why the engine cannot continue, None if it can. Only a new engine helps."""
        return self._supervisor.failed

    @property
    def reading(self) -> list[PromptProgress]:
        """How far the prompts are that are read in several forwards."""
        return [request.progress for request in self._inflight.values() if request.progress is not None]

    @property
    def requests(self) -> int:
        """Requests accepted and not answered yet, plus those waiting for a place in the queue."""
        return self._places.wanted

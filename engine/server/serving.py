"""What the routes share: a request goes to the engine; its answer is whole or a stream, one chunk a round."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio.to_thread
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry

from engine.answer import Piece, Result
from engine.api import Engine
from engine.core.errors import RequestError, RequestFailed
from engine.core.grammar import Grammar
from engine.core.params import SamplingParams
from engine.frontend.admission import Reservation
from engine.server.answers import Chunk
from engine.server.choices import Event, RunningChoices
from engine.server.errors import ApiError, api_error, returning
from engine.server.http.connection import EventStream, while_there
from engine.server.learning import Learning
from engine.server.log import Log
from engine.server.metrics import EngineCollector, Latencies
from engine.server.reading.changes import ChangedText
from engine.server.reading.progress import comment
from engine.server.render import Renderer
from engine.server.schema import ChatRequest
from engine.server.settings import Settings
from engine.server.tools.calling import Calling, ClientNames
from engine.server.traces import Traces
from engine.server.translate import ChoiceRequest, chat_choices, names_of, owned, places_for
from engine.server.vocabulary import Vocabulary
from engine.text.answer_format import AnswerFormat
from engine.text.fill_in import FillIn
from engine.wire.messages import PromptProgress

_FIRST = SamplingParams(max_tokens=8, temperature=1.0, logprobs=1, ignore_eos=True)
"""It needs what most requests make on first use: the chat template and noise."""
_FIRST_WITH_GRAMMAR = SamplingParams(max_tokens=8, grammar=Grammar(json_object=True))

_NO_EFFECT = "clients send it, and it changes no answer"
_NOT_IN_GRAMMARS = "a grammar cannot follow it, so answers are only compared with it; with strict it is refused"
_MOST_IGNORED = 4096  # names that are remembered: clients choose some of them


class Serving:
    """What the routes share. draining: the server is about to end, and accepts no new requests."""

    def __init__(self, engine: Engine, settings: Settings):
        self.engine, self.settings = engine, settings
        self.log, self.traces = Log(settings.log_prompts), Traces(settings.traces)
        self.registry = CollectorRegistry()
        self.changed = ChangedText()
        self.registry.register(EngineCollector(engine, settings.model, self.changed))
        self.latencies = Latencies(self.registry, settings.model)
        self.learning = _learning(engine, settings, self.log)
        if self.learning is not None:
            self.registry.register(self.learning)
        self.vocabulary = Vocabulary(engine.tokenizer)
        self.fill_in = FillIn.of(engine.tokenizer)
        self.answers = AnswerFormat.of(engine.tokenizer, settings.tool_format)
        self.started_s = int(time.time())
        self.draining = False
        self._ignored: set[str] = set()  # fields that the log has named

    async def warm_up(self) -> None:
        """Do the work that a first request would wait for. What this model cannot do is refused when asked for."""
        with suppress(RequestError, RequestFailed):
            await self.engine.generate("Say yes.", _FIRST)

    async def warm_up_grammars(self) -> None:
        """Do the work that a first request with a grammar would wait for: a second or two, in which others are
        answered, as many as the queue has places for.
        """
        with suppress(RequestError, RequestFailed), self.engine.reserve_beyond() as places:
            await self.engine.generate("Say yes.", _FIRST_WITH_GRAMMAR, places=places)

    def check(self) -> None:
        """Raise ApiError unless a request would start now."""
        if self.draining:
            raise ApiError(503, "this server is about to end; ask another one", "server_error", "draining")
        if (failed := self.engine.failed) is not None:
            raise failed
        if not self.engine.ready:
            raise returning()

    async def chat(
        self,
        request: Request,
        body: ChatRequest,
        renderer: Callable[[list[ChoiceRequest], Calling], Renderer],
        names: ClientNames | None = None,
    ) -> Response:
        """Answer a chat request; `renderer` says in which API's form, and `names` what the client calls its parts.
        Raises TalonError for what refuses it.
        """
        self.check()
        request.state.names = names_of(body, names)
        with places_for(body, body.n, self.engine, self.settings) as places:
            calling = await anyio.to_thread.run_sync(Calling.of, body, self.answers, names)
            choices = await chat_choices(body, self.engine, self.settings, self.vocabulary, calling)
            wanted = owned(choices, request.state.owner, self.engine.config)
            self.note(calling.noted, _NOT_IN_GRAMMARS)
            return await self.answer(request, body, wanted, renderer(wanted, calling), places, calling)

    async def answer(
        self,
        request: Request,
        body: Any,
        wanted: Sequence[ChoiceRequest],
        format_: Renderer,
        places: Reservation,
        calling: Calling | None = None,
    ) -> Response:
        """Answer a request. A stream begins once the engine has accepted it, so that refusals get their own HTTP
        status.
        """
        choices = RunningChoices(self.engine, wanted, self.latencies, places)
        record = request.state.record
        record |= {"model": self.settings.model, "stream": body.stream, "choices": len(wanted)}
        record |= {"prompt_tokens": sum(len(one.prompt) for one in wanted)} | ({"user": body.user} if body.user else {})
        if self.log.prompts:
            record["request"] = body.model_dump(exclude_unset=True, by_alias=True)
        self.note(body.ignored)
        self._compare(wanted[0].prompt)
        results = Results(self.latencies, record, self.log.prompts, wanted, calling, self.learning)
        if body.stream:
            events = self._stream(choices, format_, results, request.state.names)
            opening = await while_there(request, anext(events))
            return EventStream(events, opening, lambda: format_.ping + comment(results.progress))
        await while_there(request, results.collect(choices))
        await results.compare()
        return JSONResponse(format_.whole(results.complete).model_dump(exclude_none=False))

    def note(self, ignored: Sequence[str], why: str = _NO_EFFECT) -> None:
        """Say in the log, once a field, that clients send what has no effect."""
        for name in sorted(set(ignored) - self._ignored):
            self.log.warn(f"ignored field: {name}: {why}")
        if len(self._ignored) > _MOST_IGNORED:
            self._ignored.clear()
        self._ignored.update(ignored)

    def _compare(self, prompt: list[int]) -> None:
        """Count a change that keeps a long part of the prompt from being found in the prefix cache; the log says it
        once of each place. Clients see its text where the log may hold it and all of them are one.
        """
        if (change := self.changed.compare(prompt)) is None:
            return
        text = self.vocabulary.texts(prompt[change.at : change.at + change.tokens]) if self.log.prompts else None
        if self.changed.add(change, None if self.settings.api_keys else text):
            said = "" if text is None else f": {text!r}"
            self.log.warn(
                f"prefix cache: behind {change.at} tokens of a prompt {change.tokens} differ from an earlier one, so "
                f"the {change.behind} behind them, which do not, are read again: let what changes come later{said}"
            )

    async def _stream(
        self, choices: RunningChoices, format_: Renderer, results: Results, names: Mapping[str, str]
    ) -> AsyncGenerator[bytes]:
        async with choices:
            try:
                yield _events(format_, format_.opening())
                async for event in choices:
                    # an event that sends nothing must not put off a comment
                    if chunks := results.rendered(event, format_):
                        yield _events(format_, chunks)
                yield _events(format_, format_.ending(results.complete))
                await results.compare()
            except Exception as error:
                refusal = api_error(error, names)
                if refusal.status == 500:
                    self.log.failed(results.record["id"], error)
                self.latencies.refused(refusal.status)
                results.record["error"] = str(refusal)
                yield format_.event(format_.failure(refusal))
            yield format_.done


class Results:
    """The results of a request's choices as they arrive, counted and added to its record for the log. texts: whether
    that holds answers. calling: what they may call, if anything. progress: how far the prompt is, while it is read in
    several forwards. learning: remembers them.
    """

    def __init__(
        self,
        latencies: Latencies,
        record: dict[str, Any],
        texts: bool,
        wanted: Sequence[ChoiceRequest],
        calling: Calling | None = None,
        learning: Learning | None = None,
    ):
        self.latencies, self.record, self.texts, self.learning = latencies, record, texts, learning
        self.started_s = time.perf_counter()
        self._wanted, self._calling = wanted, calling
        self.progress: PromptProgress | None = None
        self._results: list[Result | None] = [None] * len(wanted)

    @property
    def complete(self) -> list[Result]:
        return [result for result in self._results if result is not None]

    async def collect(self, choices: RunningChoices) -> None:
        """Collect all events to the end."""
        async with choices:
            async for event in choices:
                self._see(event)

    def rendered(self, event: Event, format_: Renderer) -> list[Chunk]:
        """Return the chunks of an event."""
        self._see(event)
        choice, arrival = event
        if isinstance(arrival, PromptProgress):
            return format_.progress(choice, arrival)
        return format_.piece(choice, arrival) if isinstance(arrival, Piece) else format_.closing(choice, arrival)

    async def compare(self) -> None:
        """Say in the record which keywords of the client's schemas the finished answers do not follow."""
        if self._calling is not None and self._calling.left_out:
            found = await anyio.to_thread.run_sync(self._differences, self._calling)
            self.record |= {"not_followed": found} if found else {}

    def _differences(self, calling: Calling) -> list[str]:
        answers = zip(self.complete, self._wanted, strict=True)
        found = (path for result, one in answers for path in calling.differences(result.text, one.thinking))
        return list(dict.fromkeys(found))

    def _see(self, event: Event) -> None:
        choice, arrival = event
        record = self.record
        self.progress = arrival if isinstance(arrival, PromptProgress) else None
        if isinstance(arrival, PromptProgress):
            return
        if isinstance(arrival, Piece):
            if "first_token_s" not in record:
                record["first_token_s"] = round(time.perf_counter() - self.started_s, 4)
            record["completion_tokens"] = record.get("completion_tokens", 0) + len(arrival.token_ids)
            return
        self._results[choice] = arrival
        if self.learning is not None:
            one = self._wanted[choice]
            self.learning.keep(one.sampling.owner, one.prompt, arrival.token_ids)
        found = min(arrival.metrics.cached_tokens, arrival.prompt_tokens)
        record["cached_tokens"] = record.get("cached_tokens", 0) + found
        reason = "length" if arrival.finish_reason == "length" else "stop"
        self.latencies.ended(self.started_s, arrival, reason)
        record["finish_reasons"] = [*record.get("finish_reasons", []), reason]
        if self.texts:
            record["answers"] = [*record.get("answers", []), arrival.text]


def _learning(engine: Engine, settings: Settings, log: Log) -> Learning | None:
    """Return what learns; None where nothing does."""
    if settings.learn_gb is None:
        return None
    return Learning(engine.config, settings.model, int(settings.learn_gb * 1e9), lambda: engine.requests > 0, log)


def _events(format_: Renderer, chunks: Sequence[Chunk]) -> bytes:
    return b"".join(map(format_.event, chunks))

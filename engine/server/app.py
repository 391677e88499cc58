"""The routes. A request is checked, asked of the engine, and rendered: whole, or as a stream of one chunk a round."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from engine.answer import Piece, Result
from engine.api import Engine
from engine.errors import TalonError
from engine.server import choices
from engine.server.answers import (
    ChatCompletion,
    Error,
    Model,
    ModelList,
    Status,
    TextCompletion,
    Tokenized,
    Version,
)
from engine.server.connection import ClientGone, EventStream, while_there
from engine.server.errors import ApiError, api_error, returning
from engine.server.guard import CLIENT_GONE, Guard
from engine.server.log import Log
from engine.server.metrics import EngineCollector, Latencies
from engine.server.render import ChatFormat, Format, TextFormat
from engine.server.schema import ChatRequest, CompletionRequest, TokenizeRequest
from engine.server.settings import Settings
from engine.server.traces import Traces
from engine.server.translate import Wanted, chat_choices, text_choices
from engine.server.vocabulary import Vocabulary

VERSION = version("talon-decoding")
_DONE = b"data: [DONE]\n\n"
Responses = dict[int | str, dict[str, Any]]
_REFUSALS: Responses = {
    400: {"model": Error, "description": "A field is wrong or not supported; `param` names it."},
    401: {"model": Error, "description": "No valid API key."},
    404: {"model": Error, "description": "No such model."},
    413: {"model": Error, "description": "The body is too long."},
    429: {"model": Error, "description": "All places are taken; Retry-After says when to come back."},
    503: {"model": Error, "description": "The workers are being started again."},
}
_TEXT: Responses = {200: {"content": {"text/plain": {}}}}
_STREAM: Responses = {
    200: {"content": {"text/event-stream": {}}, "description": "The answer, or a stream of its chunks."}
}


class Serving:
    """What the routes share. draining: the server is about to end, and takes nothing new."""

    def __init__(self, engine: Engine, settings: Settings):
        self.engine, self.settings = engine, settings
        self.log, self.traces = Log(settings.log_prompts), Traces(settings.traces)
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, settings.model))
        self.latencies = Latencies(self.registry, settings.model)
        self.vocabulary = Vocabulary(engine.tokenizer)
        self.started_s = int(time.time())
        self.draining = False

    def check(self) -> None:
        """Raise ApiError unless a request would be begun now."""
        if self.draining:
            raise ApiError(503, "this server is about to end; ask another one", "server_error", "draining")
        if (failed := self.engine.failed) is not None:
            raise failed
        if not self.engine.ready:
            raise returning()

    async def answer(self, request: Request, body: Any, wanted: Sequence[Wanted], format_: Format) -> Response:
        """Errors before the first token have a status of their own, so nothing is sent before it."""
        events = choices.run(self.engine, wanted, self.latencies)
        record = request.state.record
        record |= {"model": body.model, "stream": body.stream, "choices": len(wanted)}
        record |= {"prompt_tokens": sum(len(one.prompt) for one in wanted)} | ({"user": body.user} if body.user else {})
        if self.log.prompts:
            record["request"] = body.model_dump(exclude_unset=True, by_alias=True)
        results = Results(self.latencies, record, self.log.prompts, len(wanted))
        if body.stream:
            first = await while_there(request, _next(events))
            return EventStream(self._stream(events, first, format_, results, body.includes_usage))
        await while_there(request, results.collect(events))
        return JSONResponse(format_.whole(results.complete).model_dump(exclude_none=False))

    async def _stream(
        self, events: choices.Events, first: choices.Event, format_: Format, results: Results, counted: bool
    ) -> AsyncGenerator[bytes]:
        async with aclosing(events):
            try:
                for chunk in format_.opening():
                    yield _event(chunk)
                yield _event(results.rendered(first, format_))
                async for event in events:
                    yield _event(results.rendered(event, format_))
                if counted:
                    yield _event(format_.usage(results.complete))
            except Exception as error:
                refusal = api_error(error)
                if refusal.status == 500:
                    self.log.failed(results.record["id"], error)
                self.latencies.refused(refusal.status)
                results.record["error"] = str(refusal)
                yield _event(refusal.body.model_dump())
            yield _DONE


class Results:
    """The results of a request's choices, as they come; they are counted, and stand in its record for the log."""

    def __init__(self, latencies: Latencies, record: dict[str, Any], texts: bool, choices: int):
        self.latencies, self.record, self.texts = latencies, record, texts
        self.started_s = time.perf_counter()
        self._results: list[Result | None] = [None] * choices

    @property
    def complete(self) -> list[Result]:
        return [result for result in self._results if result is not None]

    async def collect(self, events: choices.Events) -> None:
        """To the end."""
        async with aclosing(events):
            async for event in events:
                self._see(event)

    def rendered(self, event: choices.Event, format_: Format) -> dict[str, Any]:
        """The chunk of an event."""
        self._see(event)
        choice, arrival = event
        return format_.piece(choice, arrival) if isinstance(arrival, Piece) else format_.closing(choice, arrival)

    def _see(self, event: choices.Event) -> None:
        choice, arrival = event
        record = self.record
        if isinstance(arrival, Piece):
            if "first_token_s" not in record:
                record["first_token_s"] = round(time.perf_counter() - self.started_s, 4)
            record["completion_tokens"] = record.get("completion_tokens", 0) + len(arrival.token_ids)
            return
        self._results[choice] = arrival
        reason = "length" if arrival.finish_reason == "length" else "stop"
        self.latencies.ended(self.started_s, arrival, reason)
        record["finish_reasons"] = [*record.get("finish_reasons", []), reason]
        if self.texts:
            record["answers"] = [*record.get("answers", []), arrival.text]


def create_app(serving: Serving) -> FastAPI:
    """The application of one engine, which has been started."""
    engine, settings = serving.engine, serving.settings
    app = FastAPI(title="Talon", version=VERSION, redoc_url=None, separate_input_output_schemas=False)
    app.state.serving = serving
    _handle_errors(app, serving)
    app.add_middleware(
        Guard, settings=settings, log=serving.log, traces=serving.traces, refused=serving.latencies.refused
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_STREAM | _REFUSALS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer chat messages."""
        serving.check()
        wanted = await chat_choices(body, engine, settings)
        format_ = ChatFormat(settings.model, wanted, serving.vocabulary, body.includes_usage, body.return_sources)
        return await serving.answer(request, body, wanted, format_)

    @app.post("/v1/completions", response_model=TextCompletion, responses=_STREAM | _REFUSALS)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text, or with several."""
        serving.check()
        wanted = await text_choices(body, engine, settings, serving.vocabulary)
        format_ = TextFormat(settings.model, wanted, serving.vocabulary, body.includes_usage, body.return_sources)
        return await serving.answer(request, body, wanted, format_)

    @app.get("/v1/models", responses=_only(401))
    async def models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[_model(serving)])

    @app.get("/v1/models/{model:path}", responses=_only(401, 404))
    async def model(model: str) -> Model:
        """The one model that is served, by its name."""
        if model != settings.model:
            message = f"model: {model} is not served here; ask for {settings.model}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return _model(serving)

    @app.post("/tokenize", responses=_only(400, 401, 413))
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        """The token ids of a text, or of chat messages through the model's template."""
        messages = body.messages
        asked: Any = body.prompt if messages is None else [message.plain() for message in messages]
        tokens = await engine.encode(asked, raw=True)
        return Tokenized(tokens=tokens, count=len(tokens), max_model_len=engine.target.context)

    @app.get("/health", responses=_only(503))
    async def health() -> Status:
        """Whether this process can go on: 503 asks for a new one."""
        if engine.failed is not None:
            raise engine.failed
        return Status(status="ok")

    @app.get("/ready", responses=_only(503))
    async def ready() -> Status:
        """Whether a request would be begun now: 503 while workers return, and before the end."""
        serving.check()
        return Status(status="ready")

    @app.get("/version")
    async def version_() -> Version:
        """Talon's."""
        return Version(version=VERSION)

    @app.get("/metrics", response_class=Response, responses=_TEXT | _only(401))
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(serving.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        """A page that chats with the model."""
        return HTMLResponse(files("engine.server").joinpath("page.html").read_text("utf8"))

    return app


def _handle_errors(app: FastAPI, serving: Serving) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            return Response(status_code=CLIENT_GONE)
        if isinstance(error, HTTPException):
            error = _http_error(error)
        refusal = api_error(error)
        if refusal.status == 500:
            serving.log.failed(request.state.number, error)
        request.state.record["error"] = str(refusal)
        return refusal.response()

    for kind in (TalonError, RequestValidationError, HTTPException, ClientGone):
        app.add_exception_handler(kind, refuse)


def _http_error(error: HTTPException) -> ApiError:
    """Of FastAPI itself: no such path, another method, a body that cannot be read or is too long."""
    return ApiError(error.status_code, str(error.detail))


def _only(*statuses: int) -> Responses:
    return {status: _REFUSALS[status] for status in statuses}


def _model(serving: Serving) -> Model:
    return Model(id=serving.settings.model, created=serving.started_s, max_model_len=serving.engine.target.context)


async def _next(events: choices.Events) -> choices.Event:
    try:
        return await anext(events)
    except BaseException:
        await events.aclose()
        raise


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

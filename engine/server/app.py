"""The routes."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from engine.config import Config
from engine.core.errors import TalonError
from engine.server.answers import (
    ChatCompletion,
    Error,
    Model,
    ModelList,
    OpenApiResponses,
    Prompts,
    Status,
    TextCompletion,
    Tokenized,
    Version,
)
from engine.server.errors import ApiError, api_error, not_json
from engine.server.http.connection import ClientGone
from engine.server.http.guard import CLIENT_GONE, Guard
from engine.server.http.owner_names import OwnerNames
from engine.server.infill.routes import add_infill
from engine.server.messages.routes import add_messages
from engine.server.reading.state import prompts_so_far
from engine.server.render import ChatRenderer, TextRenderer, unnamed_sources
from engine.server.responses.routes import add_responses
from engine.server.schema import ChatRequest, CompletionRequest, TokenizeRequest
from engine.server.serving import Serving
from engine.server.settings import Settings
from engine.server.tools.calling import Calling, shown_to
from engine.server.translate import ChoiceRequest, check_model, names_of, owned, places_for, text_choices

VERSION = version("talon-decoding")
_REFUSALS: OpenApiResponses = {
    400: {"model": Error, "description": "A field is wrong or not supported; `param` names it."},
    401: {"model": Error, "description": "No valid API key."},
    404: {"model": Error, "description": "No such model."},
    413: {"model": Error, "description": "The body is too long."},
    415: {"model": Error, "description": "The body's Content-Encoding is not gzip."},
    429: {"model": Error, "description": "All places are taken; Retry-After says when to come back."},
    503: {"model": Error, "description": "The workers are being started again."},
}
_TEXT: OpenApiResponses = {200: {"content": {"text/plain": {}}}}
_STREAM: OpenApiResponses = {
    200: {"content": {"text/event-stream": {}}, "description": "The answer, or a stream of its chunks."}
}


def create_app(serving: Serving) -> FastAPI:
    """Make the application of one engine that has been started."""
    engine, settings, unnamed = serving.engine, serving.settings, unnamed_sources(serving.engine.config)
    app = FastAPI(
        title="Talon",
        version=VERSION,
        redoc_url=None,
        separate_input_output_schemas=False,
        root_path=settings.root_path,
    )
    app.state.serving = serving
    _handle_errors(app, serving)
    app.add_middleware(
        Guard,
        settings=settings,
        log=serving.log,
        traces=serving.traces,
        owners=_owner_names(engine.config, settings),
        refused=serving.latencies.refused,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
        )

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_STREAM | _REFUSALS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer chat messages."""

        def renderer(wanted: list[ChoiceRequest], calling: Calling) -> ChatRenderer:
            return ChatRenderer(settings.model, wanted, serving.vocabulary, body, unnamed, calling)

        return await serving.chat(request, body, renderer)

    @app.post("/v1/completions", response_model=TextCompletion, responses=_STREAM | _REFUSALS)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, or several."""
        serving.check()
        request.state.names = names_of(body)
        with places_for(body, body.n * len(body.prompts), engine, settings) as places:
            choices = await text_choices(body, engine, settings, serving.vocabulary, serving.fill_in)
            wanted = owned(choices, request.state.owner, engine.config)
            format_ = TextRenderer(settings.model, wanted, serving.vocabulary, body, unnamed)
            return await serving.answer(request, body, wanted, format_, places)

    add_messages(app, serving, _STREAM, _REFUSALS)
    add_responses(app, serving, _STREAM, _REFUSALS)
    add_infill(app, serving, _STREAM, _REFUSALS)

    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models", responses=_only(401))
    async def models() -> ModelList:
        """List the one model that is served."""
        return ModelList(data=[_model(serving)])

    @app.get("/v1/models/{model:path}", responses=_only(401, 404))
    async def model(model: str) -> Model:
        """Return the one model that is served, by its name."""
        check_model(model, settings)
        return _model(serving)

    @app.post("/tokenize", responses=_only(400, 401, 413, 415))
    async def tokenize(body: TokenizeRequest, request: Request) -> Tokenized:
        """Return the token ids of a text, or of chat messages through the model's template."""
        request.state.names = names_of(body)
        messages = body.messages
        asked: Any = body.prompt if messages is None else [message.plain() for message in messages]
        if body.model is not None:
            check_model(body.model, settings)
        tools = [] if body.tools is None else shown_to(serving.answers, body.tools)
        tokens = await engine.tokenize(asked, raw=True, rendering=replace(body.rendering, tools=tools))
        return Tokenized(tokens=tokens, count=len(tokens), max_model_len=engine.target.context)

    @app.get("/prompts", responses=_only(401))
    async def prompts() -> Prompts:
        """Tell how much of all prompts was found in the prefix cache, what kept the rest from it, and what is being
        read.
        """
        return prompts_so_far(engine, serving.changed)

    @app.get("/health", responses=_only(503))
    async def health() -> Status:
        """Tell whether this process can continue: 503 asks for a new one."""
        if engine.failed is not None:
            raise engine.failed
        return Status(status="ok")

    @app.get("/ready", responses=_only(503))
    async def ready() -> Status:
        """Tell whether a request would start now: 503 while workers restart and during shutdown."""
        serving.check()
        return Status(status="ready")

    @app.get("/version")
    async def version_() -> Version:
        """Return Talon's version, the type of the target's matrices, how their products take rows, and what keys and
        values are kept as.
        """
        target = engine.target
        return Version(version=VERSION, activations=target.activations, weights=target.weights, kv_type=target.kv_type)

    @app.get("/metrics", response_class=Response, responses=_TEXT | _only(401))
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(generate_latest(serving.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        """Return a page that chats with the model."""
        return HTMLResponse(files("engine.server").joinpath("page.html").read_text("utf8"))

    return app


def _owner_names(config: Config, settings: Settings) -> OwnerNames:
    """Return what names clients. Where a server without keys learns, clients that name no session are one owner."""
    alone = settings.learn_gb is not None and not settings.api_keys
    return OwnerNames(config.verifier.cache or config.drafter.learned, "" if alone else None)


def _handle_errors(app: FastAPI, serving: Serving) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            return Response(status_code=CLIENT_GONE)
        if isinstance(error, HTTPException):
            error = _http_error(error, app)
        refusal = api_error(error, request.state.names)
        if refusal.status == 500:
            serving.log.failed(request.state.number, error)
        request.state.record["error"] = str(refusal)
        return refusal.response(request.scope["path"])

    for kind in (TalonError, RequestValidationError, HTTPException, ClientGone):
        app.add_exception_handler(kind, refuse)


def _http_error(error: HTTPException, app: FastAPI) -> ApiError:
    """Translate errors met while a body is read, and FastAPI's own: no such path, another method."""
    if isinstance(error.detail, ApiError):
        return error.detail
    if error.status_code == 404 and error.detail == "Not Found":
        return ApiError(404, f"no such route; there are {', '.join(_paths(app))}")
    # the body holds a text that is no UTF-8, or numbers and nesting that Python does not read
    if error.status_code == 400:
        return not_json()
    return ApiError(error.status_code, str(error.detail), allow=(error.headers or {}).get("Allow", ""))


def _paths(app: FastAPI) -> list[str]:
    """Return the routes that are documented."""
    shown = (route.path for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema)
    return list(dict.fromkeys(path.replace(":path}", "}") for path in shown))


def _only(*statuses: int) -> OpenApiResponses:
    return {status: _REFUSALS[status] for status in statuses}


def _model(serving: Serving) -> Model:
    names = ("max_model_len", "context_length", "max_input_tokens")
    context = dict.fromkeys(names, serving.engine.target.context)
    return Model(id=serving.settings.model, created=serving.started_s, **context)

"""Several machines: Ray Serve runs replicas of the server, `serve run configs/serve-ray.yaml` (extra `ray`).

A front door hands each request to the replica that consistent hashing gives its session, so that a conversation finds
its suffix cache and its prompt's blocks again. A replica that dies is replaced; its requests go to another one if none
of their answer was sent yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from engine import config as configuration
from engine.api import Engine
from engine.server import traces
from engine.server.affinity import SESSION_HEADER, session_of
from engine.server.app import create_app
from engine.server.command import read_keys, short_name
from engine.server.errors import ApiError, returning
from engine.server.http.gzip_body import gunzip_for
from engine.server.http.in_process import HttpHead, HttpRequest, answer
from engine.server.log import to_standard_error
from engine.server.serving import Serving
from engine.server.settings import Settings

ROUTER = RequestRouterConfig(
    request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    request_router_kwargs={"num_fallback_replicas": 2},
)
_TRIES = 3  # replicas tried for a request until one begins to answer
_PAUSE_S = 0.3  # seconds before the second try, twice as long before the third: until dead replicas are known
_MOST_BODY = 4 << 20  # most bytes of a body
_LOST = (RayError, RayServeException)


class Arguments(BaseModel, extra="forbid"):
    """`args` of the application in the YAML file. config: of the engine, with `overrides` of its keys;
    served_model_name: what clients call the model. API keys are those of TALON_API_KEYS.
    """

    config: str = str(configuration.DEMO)
    overrides: dict[str, Any] = {}
    served_model_name: str | None = None
    max_prompt_tokens: int | None = None
    clamp_max_tokens: bool = True
    max_choices: int = 64
    tool_format: str | None = None
    log_prompts: bool = False
    traces: str | None = None


@serve.deployment(request_router_config=ROUTER, max_ongoing_requests=256, health_check_period_s=2)
class Replica:
    """An engine, and the same application as that of `talon serve`."""

    engine: Engine | None = None

    async def __init__(self, arguments: Arguments) -> None:  # type: ignore[misc]
        to_standard_error()
        config = configuration.load(arguments.config, arguments.overrides | {"queue.full": "refuse"})
        settings = Settings(
            model=arguments.served_model_name or short_name(config.model),
            api_keys=read_keys(None),
            max_prompt_tokens=arguments.max_prompt_tokens,
            clamp_max_tokens=arguments.clamp_max_tokens,
            max_choices=arguments.max_choices,
            tool_format=arguments.tool_format,
            log_prompts=arguments.log_prompts,
            traces=arguments.traces,
        )
        traces.check(settings.traces)
        self.engine = await Engine.start(config)
        serving = Serving(self.engine, settings)
        await serving.warm_up()
        await serving.warm_up_grammars()
        self.app = create_app(serving)

    async def handle(self, request: bytes) -> AsyncGenerator[bytes]:
        """Answer an HttpRequest; yields what `in_process.answer` does."""
        async with contextlib.aclosing(answer(self.app, msgspec.msgpack.decode(request, type=HttpRequest))) as parts:
            async for part in parts:
                yield part

    def check_health(self) -> None:
        """Raise an error when only a new replica helps."""
        if self.engine is not None and self.engine.failed is not None:
            raise self.engine.failed

    async def __del__(self) -> None:
        """Close the engine: Ray Serve calls this at the end of a replica."""
        if self.engine is not None:
            await self.engine.close()


@serve.deployment(max_ongoing_requests=4096)
class FrontDoor:
    """Finds the replica of each request, and passes its answer on."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self.replicas = replicas

    async def __call__(self, request: Request) -> Response:
        """Pass the request on, and its replica's answer back."""
        try:
            body, sent = await _plain(request)
        except ApiError as error:
            return error.response()
        asked = HttpRequest(request.method, request.url.path, request.scope["query_string"], sent, body)
        session = session_of(request.headers.get(SESSION_HEADER), body)
        for tried in range(_TRIES):
            await asyncio.sleep(_PAUSE_S * tried)
            parts = self.replicas.options(stream=True, session_id=session).handle.remote(msgspec.msgpack.encode(asked))
            try:
                head = msgspec.msgpack.decode(await anext(parts), type=HttpHead)
            except _LOST:
                continue  # nothing was sent: another replica gives the same answer
            headers = {name.decode("latin1"): value.decode("latin1") for name, value in head.headers}
            return StreamingResponse(_rest(parts), head.status, headers)
        return returning().response()


async def _plain(request: Request) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return the body without its compression, since its text says which replica the request belongs to, and the
    headers.
    """
    body, gunzip = b"", gunzip_for(request.headers.get("content-encoding", ""), _MOST_BODY)
    async for part in request.stream():
        body += part if gunzip is None else gunzip.feed(part)
        if len(body) > _MOST_BODY:
            raise ApiError(413, f"the body is over {_MOST_BODY} bytes; send less", code="body_too_long")
    if gunzip is not None:
        gunzip.end()
    return body, [header for header in request.headers.raw if header[0] != b"content-encoding"]


async def _rest(parts: Any) -> AsyncGenerator[bytes]:
    """Yield the body of an answer that has begun; if its replica dies, an event says so and the stream ends."""
    try:
        async for part in parts:
            yield part
    except _LOST:
        lost = ApiError(503, "the replica that answered has died; ask again", "server_error", "replica_died")
        yield b"data: " + lost.body.model_dump_json().encode() + b"\n\ndata: [DONE]\n\n"
    finally:
        parts.cancel()


def build_app(arguments: dict[str, Any]) -> serve.Application:
    """Build what `import_path` of the YAML file names, with its `args`."""
    return FrontDoor.bind(Replica.bind(Arguments.model_validate(arguments)))  # type: ignore[attr-defined]

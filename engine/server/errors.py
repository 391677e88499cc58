"""Errors as OpenAI's clients expect them: a status, and an object that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from engine.core.errors import (
    HALF_A_CHARACTER,
    EngineClosed,
    OverContext,
    ProtocolError,
    QueueFull,
    RequestError,
    TalonError,
    WorkerDied,
    shown,
)
from engine.server.answers import Error, ErrorDetail

RETRY_AFTER_S = 1
CONTEXT_LENGTH = "context_length_exceeded"
_FIELD_NAME = re.compile(r"(?!str$|int$)[a-z_0-9]+")  # a name that is not a branch of a union
_FIELD = re.compile(r"^([a-z_][a-z0-9_.]*)(=|: )")
_PROMPT = "give a text, token ids, or a list of texts or of lists of token ids; no list may be empty"
_ANTHROPIC = "/v1/messages"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_MOST_NAME = 64  # characters of an unknown field's name that are repeated


class ApiError(TalonError):
    """A refusal with its status. param: the field that is wrong; allow: the methods of the route, for 405; over: why a
    request does not fit into the context.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str = "",
        allow: str = "",
        over: OverContext | None = None,
    ):
        super().__init__(message)
        self.status, self.kind, self.code, self.param, self.allow = status, kind, code, param, allow
        self.over = over

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status == 405:
            return {"Allow": self.allow}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}

    @property
    def body(self) -> Error:
        detail = ErrorDetail(message=str(self), type=self.kind, param=self.param or None, code=self.code)
        return Error(error=detail)

    def response(self, path: str = "") -> JSONResponse:
        """Return the answer at a route, whose API it has the form of."""
        body = anthropic_error(self) if path.startswith(_ANTHROPIC) else self.body.model_dump()
        return JSONResponse(body, self.status, self.headers)


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return an error as Anthropic's clients expect it."""
    kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = str(error) if error.over is None else f"{error.param}: {_anthropic_words(error.over)}"
    said: dict[str, Any] = {"type": kind, "message": message}
    # with this answer the client's tool runner goes on without a thread
    if (error.code, error.param) == ("unsupported", "thread"):
        said["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": said}


def _anthropic_words(over: OverContext) -> str:
    """Return what Anthropic says of a request that does not fit. Its clients read the numbers and shorten the
    conversation.
    """
    if over.answer:
        return f"input length and `max_tokens` exceed context limit: {over.tokens} + {over.answer} > {over.most}"
    return f"prompt is too long: {over.tokens} tokens > {over.most} maximum"


def api_error(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """Return the error as a client sees it. Of an unexpected one it learns only that it happened: the text is for the
    log. names: what the client calls the engine's fields, where it uses other names.
    """
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _validation(error)
        case RequestError():
            return _refusal(error, names or {})
        case QueueFull():
            return ApiError(429, "all places are taken; try again later", "rate_limit_error", "queue_full")
        case WorkerDied() | EngineClosed():
            return ApiError(503, str(error), "server_error", "unavailable")
        case TalonError() if not isinstance(error, ProtocolError):
            return ApiError(500, str(error), "server_error", "request_failed")
    return ApiError(500, "an error of the server; its log says more", "server_error", "internal_error")


def not_json() -> ApiError:
    return ApiError(400, "the body is not JSON", code="invalid_json")


def returning() -> ApiError:
    """Return the error while the engine's workers are being restarted."""
    return ApiError(503, "the workers are being started again; try again soon", "server_error", "unavailable")


def field_of(message: str) -> str:
    """Return the field that one of our one-line errors names at its beginning."""
    found = _FIELD.match(message)
    return found[1] if found else ""


def _refusal(error: RequestError, names: Mapping[str, str]) -> ApiError:
    message = str(error)
    field = field_of(message)
    sent = names.get(field.partition(".")[0], field)
    over = error if isinstance(error, OverContext) else None
    code = None if over is None else CONTEXT_LENGTH
    return ApiError(400, sent + message[len(field) :], code=code, param=sent, over=over)


def _validation(error: RequestValidationError) -> ApiError:
    errors: Any = error.errors()
    # errors of several branches of a union
    branches = [one for one in errors if one["loc"][:2] == errors[0]["loc"][:2]]
    typed = [one for one in branches if not one["type"].endswith("_type")]  # errors of the branch that the client meant
    first = max(typed or branches, key=lambda one: len(one["loc"]))
    field = _path(first["loc"][1:])
    if isinstance(error.body, bytes):  # the body was not read as JSON, whatever it holds
        return ApiError(400, "the body is not sent as JSON; add the header Content-Type: application/json")
    if first["type"] == "json_invalid":
        return not_json()
    if first["type"] == "extra_forbidden":
        *above, name = first["loc"][1:]
        field = ".".join(filter(None, (_path(above), name[:_MOST_NAME])))
        return ApiError(400, f"{field}: is not supported by this server; leave it out", code="unsupported", param=field)
    if first["loc"][1:2] == ("prompt",) and len(branches) > 1:  # which branch was meant is unknown
        halved = any(one["type"] == "string_unicode" for one in branches)
        return ApiError(400, f"prompt: {HALF_A_CHARACTER if halved else _PROMPT}", param="prompt")
    same = [one for one in branches if typed == [] and _path(one["loc"][1:]) == field]
    message = " or ".join(dict.fromkeys(map(_said, same or [first])))
    if first["type"] == "value_error" and (named := field_of(message)):  # one of our own errors, which names the field
        above = f"{field}." if field else ""
        return ApiError(400, above + message, param=above + named)
    return ApiError(400, f"{field or 'body'}: {message[0].lower()}{message[1:]}", param=field)


def _path(location: Sequence[int | str]) -> str:
    """Return a location in the body as messages[1].content, without pydantic's names of a union's branches."""
    path = ""
    for above, part in zip(("", *location), location, strict=False):
        if isinstance(part, int):
            path += f"[{part}]"
        elif above != "response_format" and _FIELD_NAME.fullmatch(part):
            path += f".{part}" if path else part
    return path


def _said(error: dict[str, Any]) -> str:
    """Return what is wrong, without pydantic's own terms."""
    more = error.get("ctx", {})
    kind = more.get("discriminator", "").strip("'")
    match error["type"]:
        case "missing":
            return "is missing"
        case "too_short":
            return f"has {more['actual_length']} items; give at least {more['min_length']}"
        case "too_long":
            return f"has {more['actual_length']} items; give at most {more['max_length']}"
        case "union_tag_not_found":
            return f"names no {kind}"
        case "union_tag_invalid":
            return f"{kind} {shown(more['tag'])} is none of {more['expected_tags']}"
        case "string_unicode":
            return HALF_A_CHARACTER
    return str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")

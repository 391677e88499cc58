"""What every request passes before it reaches a route: its id, API key check, owner, body size limit and log line."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
import uuid
from collections.abc import Callable

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.affinity import SESSION_HEADER
from engine.server.errors import ApiError, api_error
from engine.server.log import Log
from engine.server.settings import Settings
from engine.server.traces import Traces

OPEN = ("/", "/health", "/ready", "/version")
"""Paths that need no key: they reveal nothing about requests."""
CLIENT_GONE = 499
_MOST_NUMBER = 64  # maximum characters of an X-Request-Id that is kept


class Guard:
    """ASGI middleware. refused: called with the status of every answer that is an error."""

    def __init__(self, app: ASGIApp, settings: Settings, log: Log, traces: Traces, refused: Callable[[int], None]):
        self.app, self.max_body_bytes = app, settings.max_body_bytes
        self.log, self.traces, self.refused = log, traces, refused
        self._keys = [_digest(key) for key in settings.api_keys]
        self._secret = secrets.token_bytes(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers, started_s = Headers(scope=scope), time.perf_counter()
        number = _number(headers.get("x-request-id"))
        record: dict[str, object] = {"id": number, "method": scope["method"], "path": scope["path"]}
        own = {"number": number, "record": record, "names": {}, "owner": self._owner(headers)}
        scope["state"] = {**scope.get("state", {}), **own}
        status = CLIENT_GONE

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = number
            await send(message)

        if scope["method"] == "HEAD":  # as GET; the server leaves out the body
            scope = {**scope, "method": "GET"}
        try:
            self._check(scope["path"], headers)
            await self.app(scope, self._limited(receive), answer)
        except Exception as error:  # a wrong key, or an unexpected error
            refusal = api_error(error)
            if not isinstance(error, ApiError):
                self.log.failed(number, error)
            if status != CLIENT_GONE:  # the answer has begun, so it can only end
                raise
            await refusal.response()(scope, receive, answer)
        finally:
            if status >= 400:
                self.refused(status)
            if scope["path"] not in OPEN or status >= 400:
                record |= {"status": status, "seconds": round(time.perf_counter() - started_s, 4)}
                self.log.request(record)
                self.traces.request(headers, record)

    def _check(self, path: str, headers: Headers) -> None:
        """Raises ApiError for a missing or wrong key, and for a body whose Content-Length is too long."""
        if self._keys and path not in OPEN and not self._lets_in(headers.get("authorization", "")):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.max_body_bytes:
            raise self._too_long()

    def _lets_in(self, authorization: str) -> bool:
        """Compares with every key, in a time that does not depend on the keys."""
        scheme, given = _given(authorization)
        fits = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme == "bearer" and any(fits)

    def _owner(self, headers: Headers) -> str | None:
        """A name for the client's API key and session, from which neither can be told; None if it has neither. Without
        keys of the server's own, what a client gives as one says nothing.
        """
        session = headers.get(SESSION_HEADER, "")
        key = _given(headers.get("authorization", ""))[1] if self._keys else b""
        if not (key or session):
            return None
        return hmac.digest(self._secret, key + session.encode("utf8", "surrogateescape"), "sha256").hex()

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that refuses a body once it grows too long."""
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:  # the exception that FastAPI lets through while it reads a body
                error = self._too_long()
                raise HTTPException(error.status, str(error))
            return message

        return limited

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is over {self.max_body_bytes} bytes; send less", code="body_too_long")


def _given(authorization: str) -> tuple[str, bytes]:
    """The scheme, and the digest of the key."""
    scheme, _, key = authorization.partition(" ")
    return scheme.lower(), _digest(key.strip())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf8", "surrogateescape")).digest()


def _number(given: str | None) -> str:
    """The client's own id of a request, if it is plain text, else a new one."""
    plain = given is not None and len(given) <= _MOST_NUMBER and given.isascii() and given.isprintable() and given
    return plain or uuid.uuid4().hex

"""What every request passes before it reaches a route. It gets an id, an owner and the path that routes know; its API
key and its body's size and compression are checked, and a log line is written when it ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Callable

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.affinity import SESSION_HEADER
from engine.server.errors import ApiError, api_error
from engine.server.http.gzip_body import gunzip_for
from engine.server.http.owner_names import OwnerNames
from engine.server.log import Log
from engine.server.settings import Settings
from engine.server.traces import Traces

OPEN = ("/", "/health", "/ready", "/version")
"""Paths that need no key: they reveal nothing about requests."""
CLIENT_GONE = 499
_SLASHES = re.compile("/{2,}")
_MOST_NUMBER = 64  # maximum characters of an X-Request-Id that is kept


class Guard:
    """ASGI middleware. refused: called with the status of every answer that is an error."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        log: Log,
        traces: Traces,
        owners: OwnerNames,
        refused: Callable[[int], None],
    ):
        self.app, self.max_body_bytes = app, settings.max_body_bytes
        self.log, self.traces, self.owners, self.refused = log, traces, owners, refused
        self._keys = [_digest(given) for key in settings.api_keys for given in _as_sent(key)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers, started_s = Headers(scope=scope), time.perf_counter()
        number = _number(headers.get("x-request-id"))
        record: dict[str, object] = {"id": number, "method": scope["method"], "path": scope["path"]}
        own = {
            "number": number,
            "record": record,
            "names": {},
            "owner": self._owner(headers),
            "key": self._key(headers),
        }
        scope["state"] = {**scope.get("state", {}), **own}
        status = CLIENT_GONE

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = number
            await send(message)

        path = _route_of(scope)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server leaves out the body
        scope = {**scope, "method": method, "path": path}
        try:
            self._check(path, headers)
            await self.app(scope, self._limited(receive, headers), answer)
        except Exception as error:  # a wrong key, or an unexpected error
            refusal = api_error(error)
            if not isinstance(error, ApiError):
                self.log.failed(number, error)
            if status != CLIENT_GONE:  # the answer has begun, so it can only end
                raise
            await refusal.response(path)(scope, receive, answer)
        finally:
            if status >= 400:
                self.refused(status)
            if path not in OPEN or status >= 400:
                record |= {"status": status, "seconds": round(time.perf_counter() - started_s, 4)}
                self.log.request(record)
                self.traces.request(headers, record)

    def _check(self, path: str, headers: Headers) -> None:
        """Raise ApiError for a missing or wrong key, and for a body whose Content-Length is too long."""
        if self._keys and path not in OPEN and not self._lets_in(_authorization(headers)):
            message = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            raise ApiError(401, message, code="invalid_api_key")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.max_body_bytes:
            raise self._too_long()

    def _lets_in(self, authorization: str) -> bool:
        """Compare with every key, in a time that does not depend on the keys."""
        scheme, given = _given(authorization)
        fits = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme == "bearer" and any(fits)

    def _owner(self, headers: Headers) -> str | None:
        """Return a name for the client. Without keys of the server's own, what a client gives as one says nothing."""
        return self.owners.name(self._key(headers), headers.get(SESSION_HEADER, ""))

    def _key(self, headers: Headers) -> bytes:
        """Return the digest of the client's API key; empty on a server without keys."""
        return _given(_authorization(headers))[1] if self._keys else b""

    def _limited(self, receive: Receive, headers: Headers) -> Receive:
        """Return a `receive` that decompresses a body, and refuses it once it is too long, as it comes or as text."""
        sent, received, gunzip = 0, 0, gunzip_for(headers.get("content-encoding", ""), self.max_body_bytes)

        async def limited() -> Message:
            nonlocal sent, received
            message = await receive()
            sent += len(message.get("body", b""))
            try:
                if gunzip is not None and message["type"] == "http.request":
                    message = {**message, "body": gunzip.feed(message.get("body", b""))}
                received += len(message.get("body", b""))
                if max(sent, received) > self.max_body_bytes:
                    raise self._too_long()
                if gunzip is not None and message["type"] == "http.request" and not message.get("more_body", False):
                    gunzip.end()
            except ApiError as error:  # FastAPI lets this exception through while it reads a body
                raise HTTPException(error.status, error) from None
            return message

        return limited

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is over {self.max_body_bytes} bytes; send less", code="body_too_long")


def _as_sent(key: str) -> set[bytes]:
    """Return the bytes of a key in a header: clients send letters beyond ASCII as UTF-8 or as Latin-1."""
    sent = {key.encode("utf8", "surrogateescape")}
    with contextlib.suppress(UnicodeEncodeError):
        sent.add(key.encode("latin1"))
    return sent


def _authorization(headers: Headers) -> str:
    """Return how the client shows its key: Anthropic's clients have a header of their own for it."""
    own = headers.get("x-api-key")
    return headers.get("authorization", "" if own is None else f"Bearer {own}")


def _given(authorization: str) -> tuple[str, bytes]:
    """Return the scheme, and the digest of the key."""
    scheme, _, key = authorization.partition(" ")
    return scheme.lower(), _digest(key.strip().encode("latin1"))  # ASGI's headers are bytes, which `Headers` decodes so


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _route_of(scope: Scope) -> str:
    """Return the path without what the proxy in front put before it, if it was left there, and without
    doubled slashes.
    """
    path, root = _SLASHES.sub("/", scope["path"]), scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _number(given: str | None) -> str:
    """Return the client's own id of a request, if it is plain text, else a new one."""
    plain = given is not None and len(given) <= _MOST_NUMBER and given.isascii() and given.isprintable() and given
    return plain or uuid.uuid4().hex

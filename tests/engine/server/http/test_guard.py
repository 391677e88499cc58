"""What the guard says of a request before any route sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="pip install 'talon-decoding[serve]'")

from engine.server.http.guard import Guard
from engine.server.http.owner_names import OwnerNames
from engine.server.log import Log
from engine.server.settings import Settings
from engine.server.traces import Traces

KEYS = ("first-key", "second-key")


def guarded(*keys: str) -> tuple[Guard, list[Any]]:
    """A guard, and the owners of the requests that it has let pass."""
    owners: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        owners.append(scope["state"]["owner"])

    settings, names = Settings("m", api_keys=keys), OwnerNames(None)
    return Guard(app, settings, Log(False), Traces(None), names, lambda status: None), owners


def ask(guard: Guard, key: str = "", session: str = "") -> None:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    headers += [(b"x-session-id", session.encode())] if session else []

    async def nothing(*message: Any) -> Any:
        return {}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(guard(scope, nothing, nothing))


def test_requests_have_one_owner_for_each_key_and_session() -> None:
    guard, owners = guarded(*KEYS)
    asked = [(key, session) for key in KEYS for session in ("", "s", "t")]
    for key, session in [*asked, *asked]:
        ask(guard, key, session)
    assert len(set(owners)) == len(asked) and owners[: len(asked)] == owners[len(asked) :]


def test_an_owner_tells_neither_key_nor_session_and_is_another_in_another_server() -> None:
    (guard, owners), (other, others) = guarded(*KEYS), guarded(*KEYS)
    ask(guard, KEYS[0], "s")
    ask(other, KEYS[0], "s")
    assert KEYS[0] not in owners[0] and len(owners[0]) == 129 and owners != others


def test_without_keys_a_session_is_an_owner_and_nothing_else_is() -> None:
    guard, owners = guarded()
    for key, session in (("", ""), ("none", ""), ("", "s"), ("none", "s")):
        ask(guard, key, session)
    assert owners[:2] == [None, None] and owners[2] == owners[3] is not None
